/* Everything in the kernel headers is inlined into the few functions that the table points to. */
#ifndef KT_INLINE_H
#define KT_INLINE_H
#include <stddef.h>
#include <stdint.h>
#define KT_INLINE static inline __attribute__((always_inline))
#endif
