/* AVX-512 BF16: adds nothing to the int8 core. */
#ifndef KT_ISA_AVX512_BF16_H
#define KT_ISA_AVX512_BF16_H
#include "isa_avx512_vnni.h"
#endif
