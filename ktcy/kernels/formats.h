/* The list of formats. A new one is its header, one include and one line here. */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include "fmt_int8.h"

#define KT_FORMATS(X) X(int8, "int8-n16k4-v1")

#endif
