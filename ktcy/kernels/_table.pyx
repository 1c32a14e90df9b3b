"""A variant's kernels as Python sees them: the table behind its capsule, formats, and single operations.

For property tests and micro-benchmarks of one kernel; the layer (ktcy.moe) calls the same table from C.
"""

cimport cython
cimport numpy as cnp
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uintptr_t

import numpy as np

cnp.import_array()

# Numpy's number of bfloat16, which ml_dtypes gives when it is imported: importing it here can take more than a second.
cdef int _bfloat16 = -1

# config.Activation.gate -> kt_gate
GATES = {"swiglu": KT_SWIGLU, "gelu": KT_GELU, "gelu_tanh": KT_GELU_TANH}


cdef int dtype_code(cnp.dtype dtype) except -1:
    """By number: the name of a dtype is put together by Python code (2 us)."""
    global _bfloat16
    cdef int number = dtype.type_num
    if cnp.PyArray_IsNativeByteOrder(dtype.byteorder):
        if number == cnp.NPY_FLOAT32:
            return KT_F32
        if number == cnp.NPY_FLOAT16:
            return KT_F16
        if number == _bfloat16:
            return KT_BF16
        if dtype.name == "bfloat16":
            _bfloat16 = number
            return KT_BF16
    raise TypeError(f"dtype {dtype} is not supported; use float32, float16 or bfloat16")


cdef uintptr_t address(array):
    return array.__array_interface__["data"][0]


def _strides(array):
    """Strides in elements; they must be whole."""
    size = array.itemsize
    if any(s % size for s in array.strides):
        raise ValueError(f"strides {array.strides} are no multiples of the element size {size}")
    return [s // size for s in array.strides]


def _blocks(name, array, rows, width):
    """Checks a [blocks, bytes] array whose rows are contiguous, and gives its address and row stride."""
    if array.dtype != np.uint8 or array.shape != (rows, width) or (array.size and width > 1 and array.strides[1] != 1):
        raise ValueError(
            f"{name} must be uint8 [{rows}, {width}] with contiguous rows, not {array.dtype} {list(array.shape)}"
        )
    return address(array), array.strides[0]


def _packed(name, array, shape, dtype):
    """A C-contiguous array of this shape and dtype, as it is; kernels write into it or read it in place."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous {np.dtype(dtype)} {list(shape)}, not {array.dtype} {list(array.shape)}"
        )
    return array


def _of_shape(name, array, shape, dtype):
    if array is None or array.dtype != dtype or array.shape != shape:
        found = None if array is None else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{name} must be {np.dtype(dtype)} {list(shape)}, not {found}")
    return array


def _numbers(name, values, dtype, count, limit=None):
    values = np.ascontiguousarray(values, dtype)
    if values.shape != (count,) or (limit is not None and count and not 0 <= values.min() <= values.max() < limit):
        raise ValueError(f"{name} must be [{count}]" + (f" in 0..{limit - 1}" if limit is not None else ""))
    return values


@cython.final
cdef class Kernels:
    """The kernels of one CPU variant.

    Parameters
    ----------
    capsule : PyCapsule
        ``table`` of a variant module. Its name carries the ABI version.

    Raises
    ------
    ValueError
        For a capsule of another ABI.
    """

    def __init__(self, capsule):
        self.table = <const kt_kernels *>PyCapsule_GetPointer(capsule, KT_CAPSULE)
        self.capsule = capsule
        self.name = self.table.name.decode()

    def __repr__(self):
        return f"<Kernels {self.name}>"

    @property
    def formats(self):
        """Names of the weight formats."""
        return tuple(self.table.formats[i].name.decode() for i in range(self.table.n_formats))

    @property
    def ops(self):
        """Vocabulary operations: name -> (sizes of the inputs, size of the output), in bytes."""
        cdef const kt_op *op
        result = {}
        for i in range(self.table.n_ops):
            op = &self.table.ops[i]
            result[op.name.decode()] = (tuple(op.in_[j] for j in range(3) if op.in_[j]), op.out)
        return result

    def format(self, name):
        """The weight format ``name``; ValueError for an unknown one."""
        cdef Format fmt
        for i in range(self.table.n_formats):
            if self.table.formats[i].name.decode() == name:
                fmt = Format.__new__(Format)
                fmt.fmt = &self.table.formats[i]
                fmt.kernels = self
                fmt.name = name
                fmt.layout = fmt.fmt.layout.decode()
                return fmt
        raise ValueError(f"unknown format {name!r}; the formats are {', '.join(self.formats)}")

    def op(self, name, *inputs):
        """Runs one vocabulary operation on bytes, with FTZ and DAZ set as in kernels.

        Parameters
        ----------
        name : str
            A key of `ops`.
        inputs : array_like
            Arrays of exactly the sizes that `ops` gives.

        Returns
        -------
        numpy.ndarray
            uint8; view it as the type the operation yields.
        """
        cdef const kt_op *op
        cdef kt_thread state
        cdef uintptr_t at[3]
        sizes, size = self.ops[name]
        arrays = [np.ascontiguousarray(a) for a in inputs]
        if tuple(a.nbytes for a in arrays) != sizes:
            raise ValueError(f"{name} takes inputs of {sizes} bytes, not {tuple(a.nbytes for a in arrays)}")
        out = np.zeros(size, np.uint8)
        cdef uintptr_t target = address(out)
        for i in range(3):
            at[i] = address(arrays[i]) if i < len(arrays) else 0
        for i in range(self.table.n_ops):
            op = &self.table.ops[i]
            if op.name.decode() == name:
                with nogil:
                    self.table.begin(&state, 1)
                    op.call(<void *>at[0], <void *>at[1], <void *>at[2], <void *>target)
                    self.table.end(&state)
        return out

    def store(self, src, dtype):
        """float32 [n] rounded to ``dtype`` (nearest even), as the layer writes its output."""
        cdef kt_thread state
        values = np.ascontiguousarray(src, np.float32)
        out = np.empty(values.shape, dtype)
        cdef uintptr_t source = address(values), target = address(out)
        cdef int64_t n = values.size
        cdef int code = dtype_code(out.dtype)
        with nogil:
            self.table.begin(&state, 0)
            self.table.store(<float *>source, n, <kt_dtype>code, <void *>target)
            self.table.end(&state)
        return out


@cython.final
cdef class Format:
    """One weight format of one variant: sizes, packing and the products on packed weights.

    A matrix is [N, K]; packed, it is ``ceil(N / 16)`` blocks of `weight_bytes` and as many of `scale_bytes`
    (kernels/table.h draws the layouts).
    """

    def __init__(self):
        raise TypeError("a Format comes from Kernels.format(name)")

    def __repr__(self):
        return f"<Format {self.name} ({self.layout}) of {self.kernels.name}>"

    @property
    def few_rows(self):
        """Up to this many rows the product reads rows where they lie, above it gathers them in tiles."""
        return self.fmt.few_rows

    def weight_bytes(self, k):
        """Bytes of one packed block of 16 rows of K values."""
        return self.fmt.weight_bytes(k)

    def scale_bytes(self, k):
        """Bytes of the scales of one block of 16 rows of K values."""
        return self.fmt.scale_bytes(k)

    @property
    def core(self):
        """Which core multiplies: "int8" or "bf16"."""
        return "int8" if self.fmt.rows in (b"s8", b"int4") else "bf16"

    @property
    def codes(self):
        """Kind of the codes that `pack` takes (weights/quantized.py), or None: it takes floats."""
        return None if self.fmt.codes == NULL else self.fmt.codes.decode()

    @property
    def code_scale(self):
        """Name of the dtype of the codes' scales, or None."""
        return None if self.fmt.scale == NULL else self.fmt.scale.decode()

    @property
    def group(self):
        """So many values of K share one of the codes' scales; 0 means all of a row."""
        return self.fmt.group

    @property
    def zero(self):
        """Whether the codes have zero points."""
        return bool(self.fmt.zero)

    def pack(self, src, weight, scale, code_scale=None, zero=None):
        """Quantizes a matrix of floats, or packs one of codes as it is.

        Parameters
        ----------
        src : numpy.ndarray
            [N, K] float32, float16 or bfloat16, any strides; uint8 for a format of codes.
        weight : numpy.ndarray
            uint8 [ceil(N / 16), weight_bytes(K)], rows contiguous, written.
        scale : numpy.ndarray
            uint8 [ceil(N / 16), scale_bytes(K)], rows contiguous, written.
        code_scale : numpy.ndarray, optional
            [N, ceil(K / group)] of dtype `code_scale`, for codes.
        zero : numpy.ndarray, optional
            uint8, of the same shape, for codes that have zero points.

        Raises
        ------
        ValueError
            For shapes that do not fit, or a value that is not finite; ``row`` and ``column`` are in the message. For
            scales of rows that the format does not keep apart.
        TypeError
            For floats where codes are expected, or the reverse.
        """
        cdef kt_thread state
        cdef kt_source rows
        if src.ndim != 2:
            raise ValueError(f"a matrix [N, K] is expected, not {src.ndim} dimensions")
        if (src.dtype == np.uint8) != (self.fmt.codes != NULL):
            raise TypeError(f"{self.name} packs {self.codes or 'float'} values, not {src.dtype}")
        cdef int64_t n = src.shape[0], k = src.shape[1], size = src.itemsize, bad = 0, row = 0, step
        if k < 1 or k > KT_MAX_K:
            raise ValueError(f"K must be from 1 to {KT_MAX_K}, not {k}")
        cdef int64_t weight_stride, scale_stride, code_size = 0
        cdef uintptr_t source = address(src), w, s, codes = 0, zeros = 0
        rows.dtype = KT_CODES if self.fmt.codes != NULL else <kt_dtype>dtype_code(src.dtype)
        rows.row_stride, rows.col_stride = _strides(src)
        rows.scale_stride = rows.zero_stride = 0
        if self.fmt.codes != NULL:
            groups = (n, 1 if self.fmt.group == 0 else -(-k // self.fmt.group))
            if code_scale.dtype.name != self.code_scale or code_scale.shape != groups:
                raise ValueError(
                    f"code_scale must be {self.code_scale} {list(groups)}, not {code_scale.dtype} "
                    f"{list(code_scale.shape)}"
                )
            code_scale = np.ascontiguousarray(code_scale)
            codes, code_size, rows.scale_stride = address(code_scale), code_scale.itemsize, groups[1]
            if self.fmt.zero:
                zero = np.ascontiguousarray(_of_shape("zero", zero, groups, np.uint8))
                zeros, rows.zero_stride = address(zero), groups[1]
        blocks = (n + KT_BLOCK - 1) // KT_BLOCK
        w, weight_stride = _blocks("weight", weight, blocks, self.fmt.weight_bytes(k))
        s, scale_stride = _blocks("scale", scale, blocks, self.fmt.scale_bytes(k))
        cdef void *work = PyMem_Malloc(self.fmt.pack_work(k))
        if work == NULL:
            raise MemoryError(f"{self.fmt.pack_work(k)} bytes to pack rows of {k} values")
        with nogil:
            self.kernels.table.begin(&state, 0)
            while row < n and not bad:
                step = min(n - row, KT_BLOCK)
                rows.values = <void *>(source + row * rows.row_stride * size)
                rows.scale = <void *>(codes + row * rows.scale_stride * code_size)
                rows.zero = <const uint8_t *>(zeros + row * rows.zero_stride)
                bad = self.fmt.pack(&rows, step, k, <void *>w, <void *>s, work)
                if not bad:
                    row += KT_BLOCK
                    w += weight_stride
                    s += scale_stride
            self.kernels.table.end(&state)
        PyMem_Free(work)
        if bad == KT_SCALES_DIFFER:
            raise ValueError(
                f"rows {row} to {row + step - 1} have different scales, and {self.name} keeps one for each 16 rows: "
                "blocks of scales must begin at multiples of 16 rows"
            )
        if bad:
            row += (bad - 1) // k
            column = (bad - 1) % k
            at = f"{src[row, column]} at row {row}, column {column}"
            if self.codes:
                raise ValueError(f"the {self.codes} code {at} is NaN or has too large a scale")
            what = "too large for bfloat16" if np.isfinite(src[row, column]) else "not finite"
            raise ValueError(f"the value {at} is {what}")

    def unpack(self, weight, scale, n, k):
        """The float32 values [n, k] that packed blocks stand for (arrays as in `pack`)."""
        cdef int64_t weight_stride, scale_stride, columns = k, i, blocks = -(-n // KT_BLOCK)
        cdef uintptr_t w, s
        w, weight_stride = _blocks("weight", weight, blocks, self.fmt.weight_bytes(k))
        s, scale_stride = _blocks("scale", scale, blocks, self.fmt.scale_bytes(k))
        out = np.empty((blocks * KT_BLOCK, k), np.float32)
        cdef uintptr_t target = address(out)
        with nogil:
            for i in range(blocks):
                self.fmt.unpack(<void *>(w + i * weight_stride), <void *>(s + i * scale_stride), columns,
                                <float *>target + i * KT_BLOCK * columns, columns)
        return out[:n]

    def quantize(self, rows):
        """Quantizes activation rows [M, K] to (uint8 [M, row_bytes], scale float32 [M], sum int32 [M])."""
        cdef kt_thread state
        cdef kt_meta meta
        cdef int code = dtype_code(rows.dtype)
        cdef int64_t m = rows.shape[0], k = rows.shape[1], i, size = rows.itemsize, stride, unit
        stride, unit = _strides(rows)
        if unit != 1 and k > 1 and m:
            raise ValueError("the values of a row must be contiguous")
        out = np.empty((m, self.fmt.row_bytes(k)), np.uint8)
        scale = np.empty(m, np.float32)
        total = np.empty(m, np.int32)
        cdef uintptr_t source = address(rows), target = address(out)
        cdef float[::1] scales = scale
        cdef int32_t[::1] sums = total
        cdef int64_t width = out.shape[1]
        with nogil:
            self.kernels.table.begin(&state, 0)
            for i in range(m):
                self.fmt.quantize(<void *>(source + i * stride * size), <kt_dtype>code, k,
                                  <void *>(target + i * width), &meta)
                scales[i] = meta.scale
                sums[i] = meta.sum
            self.kernels.table.end(&state)
        return out, scale, total

    def gate_up(self, x, weight, scale, bias=None, activation=("swiglu", 1.0, float("inf"), 0.0), index=None,
                bint tiles=False, blocks=None, out=None):
        """Gate and up products and the activation: h = activation(x gate^T + bias, x up^T + bias).

        Parameters
        ----------
        x : array [R, K], or what `quantize` returned
            Rows; float rows are quantized first.
        weight, scale : numpy.ndarray
            uint8 [2J, bytes]: gate and up blocks alternate.
        bias : numpy.ndarray, optional
            float32 [2J, 16], as packed.
        activation : tuple
            Fields of ktcy.config.Activation.
        index : array_like of int, optional
            [M] rows of x to use; the default is all.
        tiles : bool
            Gather the rows in tiles, as for many rows.
        blocks : (int, int), optional
            Compute blocks j0 to j1 - 1 of 16 columns only.
        out : numpy.ndarray, optional
            float32 [M, 16 J]; other blocks stay as they are.

        Returns
        -------
        numpy.ndarray
            float32 [M, 16 J].
        """
        cdef kt_gemm g
        cdef kt_thread state
        cdef kt_activation act
        kept = operands(self, &g, x, weight, scale, bias, index, tiles)
        gate, act.alpha, act.limit, act.offset = activation
        act.gate = GATES[gate]
        cdef int64_t j0, j1, most = len(weight) // 2
        j0, j1 = (0, most) if blocks is None else blocks
        if len(weight) % 2 or not 0 <= j0 <= j1 <= most:
            raise ValueError(f"blocks {j0} to {j1} of {len(weight)} / 2")
        if out is None:
            out = np.empty((g.m, most * KT_BLOCK), np.float32)
        cdef uintptr_t h = address(_packed("out", out, (g.m, most * KT_BLOCK), np.float32))
        with nogil:
            self.kernels.table.begin(&state, tiles)
            self.fmt.gate_up(&g, &act, j0, j1, <float *>h, most * KT_BLOCK)
            self.kernels.table.end(&state)
        return out

    def down(self, x, weight, scale, bias, row, route, out, index=None, bint tiles=False, blocks=None):
        """The weighted down product: out[row[i]] += route[i] * (x[i] down^T + bias), in the order of i.

        Parameters
        ----------
        x, index, tiles
            As for `gate_up`.
        weight, scale, bias : numpy.ndarray
            uint8 [B, bytes] twice, float32 [B, 16] or None.
        row, route : array_like
            [M] int and float32: where each row is added, and its factor.
        out : numpy.ndarray
            float32 [T, 16 B], added to.
        blocks : (int, int), optional
            Compute blocks b0 to b1 - 1 of 16 columns only.
        """
        cdef kt_gemm g
        cdef kt_thread state
        kept = operands(self, &g, x, weight, scale, bias, index, tiles)
        cdef int64_t b0, b1, most = len(weight)
        b0, b1 = (0, most) if blocks is None else blocks
        if not 0 <= b0 <= b1 <= most:
            raise ValueError(f"blocks {b0} to {b1} of {most}")
        row = _numbers("row", row, np.int32, g.m, len(out))
        route = _numbers("route", route, np.float32, g.m)
        cdef uintptr_t to = address(row), factor = address(route)
        cdef uintptr_t y = address(_packed("out", out, (len(out), most * KT_BLOCK), np.float32))
        with nogil:
            self.kernels.table.begin(&state, tiles)
            self.fmt.down(&g, <int32_t *>to, <float *>factor, b0, b1, <float *>y + b0 * KT_BLOCK, most * KT_BLOCK)
            self.kernels.table.end(&state)


cdef operands(Format fmt, kt_gemm *g, x, weight, scale, bias, index, bint tiles):
    """Fills g; returns the arrays it points into."""
    rows, scales, sums = x if isinstance(x, tuple) else fmt.quantize(x)
    cdef int64_t count = len(rows), k, i, row, padded
    if isinstance(x, tuple):
        k = weight.shape[1] * KT_KPAD // fmt.fmt.weight_bytes(KT_KPAD)
    else:
        k = (x.shape[1] + KT_KPAD - 1) // KT_KPAD * KT_KPAD
    cdef int64_t width = fmt.fmt.row_bytes(k), tile = fmt.fmt.panel_bytes(k)
    blocks = len(weight)
    meta = np.empty(count, [("scale", np.float32), ("sum", np.int32)])
    meta["scale"], meta["sum"] = scales, sums
    kept = [
        _packed("quantized rows", rows, (count, width), np.uint8),
        _packed("weight", weight, (blocks, fmt.fmt.weight_bytes(k)), np.uint8),
        _packed("scale", scale, (blocks, fmt.fmt.scale_bytes(k)), np.uint8),
        meta,
    ]
    g.m, g.k, g.ldx = count, k, width
    g.x, g.meta = <void *>address(rows), <kt_meta *>address(meta)
    g.weight, g.scale = <void *>address(weight), <void *>address(scale)
    g.index, g.tiles, g.bias, g.next, g.next_scale = NULL, NULL, NULL, NULL, NULL
    work = np.empty(fmt.fmt.work_bytes(k), np.uint8)
    kept.append(work)
    g.work = <void *>address(work)
    if bias is not None:
        kept.append(_packed("bias", bias, (blocks, KT_BLOCK), np.float32))
        g.bias = <float *>address(bias)
    if index is not None:
        index = _numbers("index", index, np.int32, len(index), count)
        kept.append(index)
        g.m, g.index = len(index), <int32_t *>address(index)
    if tiles:
        padded = (g.m + KT_BLOCK - 1) // KT_BLOCK * KT_BLOCK
        panel = np.empty(padded * tile, np.uint8)
        kept.append(panel)
        g.tiles = <void *>address(panel)
        for i in range(padded):
            row = g.index[i] if g.index != NULL and i < g.m else i
            fmt.fmt.tile(NULL if i >= g.m else <char *>g.x + row * width, k, i, <void *>g.tiles)
    return kept
