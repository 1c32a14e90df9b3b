/* The list of formats. A new one is its header, one include and one line here:
 * name, prefix of its activation rows, layout, and what pack takes: codes, their scales, group, zero points. */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include "fmt_bf16.h"
#include "fmt_int4.h"
#include "fmt_int8.h"

#define KT_FORMATS(X) \
    X(int8, s8, "int8-n16k4-v1", NULL, NULL, 0, 0) \
    X(int4, int4, "int4-n16k8-g32-v1", NULL, NULL, 0, 0) \
    X(bf16, bf16, "bf16-n16k2-v1", NULL, NULL, 0, 0)

#endif
