/* The list of formats. A new one is its header, one include and one line here:
 * name, prefix of its activation rows, layout, and what pack takes: codes, their scales, group, zero points. */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include "fmt_bf16.h"
#include "fmt_fp8.h"
#include "fmt_grouped.h"
#include "fmt_int4.h"
#include "fmt_int8.h"
#include "fmt_mx.h"

#define KT_FORMATS(X) \
    X(int8, s8, "int8-n16k4-v1", NULL, NULL, 0, 0) \
    X(int4, int4, "int4-n16k8-g32-v1", NULL, NULL, 0, 0) \
    X(bf16, bf16, "bf16-n16k2-v1", NULL, NULL, 0, 0) \
    X(rawint4, g32b15, "int4-n16k8-g32-bf16-v1", "int4", "bfloat16", 32, 0) \
    X(q4_0, g32b15, "int4-n16k8-g32-f16-v1", "int4", "float16", 32, 0) \
    X(q8_0, g32b12, "int8-n16k4-g32-f16-v1", "int8", "float16", 32, 0) \
    X(gptq32, g32b15, "int4-n16k8-g32-f16-zero-v1", "int4", "float16", 32, 1) \
    X(gptq64, g64b14, "int4-n16k8-g64-f16-zero-v1", "int4", "float16", 64, 1) \
    X(gptq128, g128b13, "int4-n16k8-g128-f16-zero-v1", "int4", "float16", 128, 1) \
    X(fp8, bf16, "fp8-n16k4-g128-v2", "e4m3", "float32", 128, 0) \
    X(fp8_channel, bf16, "fp8-n16k4-row-v2", "e4m3", "float32", 0, 0) \
    X(mxfp8, bf16, "mxfp8-n16k4-g32-v2", "e4m3", "uint8", 32, 0) \
    X(mxfp4, g32b14, "mxfp4-n16k8-g32-v1", "e2m1", "uint8", 32, 0)

#endif
