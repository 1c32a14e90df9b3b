/* Gated activations. One polynomial each, every operation written out, so all variants give the same bits. */
#ifndef KT_ACTIVATION_H
#define KT_ACTIVATION_H

#include "table.h"

/* exp(x) for x clamped to [-87, 88], relative error under 1.5e-7 (3.3e-9 of it the polynomial's).
 * x = n ln 2 + r; exp(r) = 1 + r + r^2 q(r), q a minimax fit on |r| <= ln(2) / 2. NaN stays NaN: min and
 * max return their second operand when either is NaN. */
KT_INLINE vf32 vf32_exp(vf32 x) {
    x = vf32_min(vf32_set1(88.0f), vf32_max(vf32_set1(-87.0f), x));
    const vf32 n = vf32_round(vf32_mul(x, vf32_set1(0x1.715476p+0f)));
    /* ln 2 in two parts; the first has 9 bits, so n * part is exact. */
    vf32 r = vf32_fma(n, vf32_set1(-0x1.63p-1f), x);
    r = vf32_fma(n, vf32_set1(0x1.bd0106p-13f), r);
    vf32 q = vf32_set1(0x1.6a1a6ep-10f);
    q = vf32_fma(q, r, vf32_set1(0x1.123fc6p-7f));
    q = vf32_fma(q, r, vf32_set1(0x1.555916p-5f));
    q = vf32_fma(q, r, vf32_set1(0x1.55548ap-3f));
    q = vf32_fma(q, r, vf32_set1(0x1.fffffcp-2f));
    const vf32 p = vf32_fma(q, vf32_mul(r, r), vf32_add(r, vf32_set1(1.0f)));
    /* p is in [0.7, 1.5) and n in [-126, 127]: adding n to the exponent is exact and stays normal. */
    return vi32_float(vi32_add(vf32_bits(p), vi32_shl(vi32_from_vf32(n), 23)));
}

/* x * sigmoid(a) */
KT_INLINE vf32 kt_sigmoid_times(vf32 x, vf32 a) {
    const vf32 one = vf32_set1(1.0f);
    return vf32_div(x, vf32_add(one, vf32_exp(vf32_sub(vf32_set1(0.0f), a))));
}

/* x * Phi(x). With t = |x|: Phi(-t) = exp(-t^2 / 2) R(u), u = 1 / (1 + 0.36 t), R a minimax fit of
 * erfcx(t / sqrt(2)) / 2 on [0, 13.5] with relative error 9.2e-7; Phi(t) = 1 - Phi(-t). */
KT_INLINE vf32 kt_gelu(vf32 x) {
    const vf32 one = vf32_set1(1.0f);
    const vf32 t = vi32_float(vi32_and(vf32_bits(x), vi32_set1(0x7fffffff)));
    const vf32 u = vf32_div(one, vf32_fma(t, vf32_set1(0.36f), one));
    vf32 R = vf32_set1(0.04717475f);
    R = vf32_fma(R, u, vf32_set1(-0.18023109f));
    R = vf32_fma(R, u, vf32_set1(0.1816883f));
    R = vf32_fma(R, u, vf32_set1(0.02596204f));
    R = vf32_fma(R, u, vf32_set1(0.13996837f));
    R = vf32_fma(R, u, vf32_set1(0.1417201f));
    R = vf32_fma(R, u, vf32_set1(0.1437172f));
    R = vf32_mul(R, u);
    const vf32 lower = vf32_mul(R, vf32_exp(vf32_mul(vf32_mul(t, vf32_set1(-0.5f)), t)));
    const vi32 negative = vi32_shr(vf32_bits(x), 31);
    const vi32 phi = vi32_select_gt(negative, vi32_set1(0), vf32_bits(lower), vf32_bits(vf32_sub(one, lower)));
    return vf32_mul(x, vi32_float(phi));
}

/* x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 = x * sigmoid(2 sqrt(2 / pi) x (1 + 0.044715 x^2)) */
KT_INLINE vf32 kt_gelu_tanh(vf32 x) {
    const vf32 cubic = vf32_fma(vf32_mul(x, x), vf32_set1(0.044715f), vf32_set1(1.0f));
    return kt_sigmoid_times(x, vf32_mul(vf32_mul(x, vf32_set1(1.5957691f)), cubic));
}

KT_INLINE vf32 kt_activate(const kt_activation *act, vf32 gate, vf32 up) {
    if (act->gate == KT_GELU)
        return vf32_mul(kt_gelu(gate), up);
    if (act->gate == KT_GELU_TANH)
        return vf32_mul(kt_gelu_tanh(gate), up);
    const vf32 limit = vf32_set1(act->limit);
    gate = vf32_min(limit, gate);
    up = vf32_min(limit, vf32_max(vf32_set1(-act->limit), up));
    const vf32 swish = kt_sigmoid_times(gate, vf32_mul(vf32_set1(act->alpha), gate));
    return vf32_mul(swish, vf32_add(up, vf32_set1(act->offset)));
}

#endif
