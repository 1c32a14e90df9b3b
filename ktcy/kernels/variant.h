/* One variant: KT_ISA names its header, KT_NAME its row; with KT_EMULATE the header's instructions are modelled. */
#ifndef KT_VARIANT_H
#define KT_VARIANT_H

#ifdef KT_EMULATE
#include "isa_emulated.h"
#endif

#define KT_QUOTE_(x) #x
#define KT_QUOTE(x) KT_QUOTE_(x)
#define KT_HEADER(isa) KT_QUOTE(isa_##isa.h)
#define KT_HEADER_OF(isa) KT_HEADER(isa)
#include KT_HEADER_OF(KT_ISA)

#include "table.h"

#include "formats.h"
#include "ops.h"

/* FTZ and DAZ as AMX has them in hardware, round to nearest, no traps. */
static void kt_begin(kt_thread *t, int tiles) {
    *t = (kt_thread){kt_csr_get(), tiles};
    kt_csr_set(0x9fc0);
    if (tiles)
        kt_tiles_begin();
}
static void kt_end(kt_thread *t) {
    if (t->tiles)
        kt_tiles_end();
    kt_csr_set(t->mxcsr);
}

static uint64_t kt_probe_read(const void *p, int64_t bytes) {
    vi32 sum[4] = {vi32_set1(0), vi32_set1(0), vi32_set1(0), vi32_set1(0)};
    const char *at = p;
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
        for (int j = 0; j < 4; j++)
            sum[j] = vi32_add(sum[j], vi32_load((const int32_t *)(at + i + 64 * j)));
        KT_PREFETCH(at + i + KT_AHEAD);
        KT_PREFETCH(at + i + KT_AHEAD + 64);
        KT_PREFETCH(at + i + KT_AHEAD + 128);
        KT_PREFETCH(at + i + KT_AHEAD + 192);
    }
    return (uint32_t)vi32_hsum(vi32_add(vi32_add(sum[0], sum[1]), vi32_add(sum[2], sum[3])));
}

#define KT_FORMAT_ROW(f, rows, layout, codes, scale, group, zero) \
    {#f, layout, #rows, codes, scale, group, zero, KT_FEW_ROWS, f##_weight_bytes, f##_scale_bytes, rows##_row_bytes, \
     rows##_panel_bytes, f##_work_bytes, f##_pack_work, f##_pack, f##_unpack, rows##_quantize, rows##_tile, \
     f##_gate_up, f##_down},
static const kt_format kt_formats[] = {KT_FORMATS(KT_FORMAT_ROW)};

static const kt_kernels kt_table = {
    KT_NAME,
    kt_begin,
    kt_end,
    kt_store_row,
    kt_probe_read,
    kt_probe_s8,
    kt_probe_bf16,
    kt_formats,
    sizeof kt_formats / sizeof *kt_formats,
    kt_ops,
    sizeof kt_ops / sizeof *kt_ops,
};

#endif
