"""`KTMoEWrapper`: the routed experts of one Mixture-of-Experts layer, computed on the CPU."""

import logging
import threading
import warnings
from collections import deque

import numpy as np

from . import kernels
from .arrays import FLOATS, as_numpy, floats, is_torch, like
from .buffers import Buffers
from .config import MADE, Activation, LayerShape, integer, method_of, method_takes
from .moe import MoE
from .runtime.queue import CPUInfer, shared
from .weights.packed import PackedLayer
from .weights.source import is_source, layer_format, open_source

log = logging.getLogger(__name__)

_buffers = Buffers()


def _expert_map(value, num_experts):
    """``physical_to_logical_map`` as a list: which stored expert each id means."""
    if value is None:
        return list(range(num_experts))
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    array = as_numpy(value, "physical_to_logical_map")
    if array.dtype.kind not in "iu":
        raise TypeError(f"physical_to_logical_map must hold integers, not {array.dtype}")
    if array.shape != (num_experts,):
        raise ValueError(f"physical_to_logical_map has shape {list(array.shape)}, expected [{num_experts}]")
    outside = np.flatnonzero((array < 0) | (array >= num_experts))
    if outside.size:
        i = outside[0]
        raise ValueError(f"physical_to_logical_map[{i}] is {array[i]}; experts run from 0 to {num_experts - 1}")
    return array.tolist()


def _gpu_mask(num_gpu_experts, gpu_experts_mask, num_experts):
    """The bool mask [num_experts] that the two ways to say it agree on."""
    num_gpu_experts = integer("num_gpu_experts", num_gpu_experts, 0, num_experts)
    if gpu_experts_mask is None:
        return np.arange(num_experts) < num_gpu_experts
    mask = np.array(as_numpy(gpu_experts_mask, "gpu_experts_mask"))
    if mask.dtype != np.bool_ or mask.shape != (num_experts,):
        raise ValueError(f"gpu_experts_mask must be bool [{num_experts}], not {mask.dtype} {list(mask.shape)}")
    if num_gpu_experts and num_gpu_experts != mask.sum():
        raise ValueError(f"num_gpu_experts is {num_gpu_experts}, but gpu_experts_mask marks {mask.sum()}; give one")
    return mask


def _rows_contiguous(array):
    return array.shape[1] == 1 or array.strides[1] == array.itemsize


def _checked_out(out, shape, rows):
    """``out`` as a numpy view, writable, no two of its elements in one place, and the view of shape ``rows`` that a
    forward can write, or None."""
    target = floats(out, "out", shape)
    if not target.flags.writeable:
        raise ValueError("out is read-only")
    if target.size:
        end = target.itemsize
        for stride, n in sorted((abs(stride), n) for stride, n in zip(target.strides, target.shape) if n > 1):
            if stride == 0:
                raise ValueError("out is a broadcast: several of its elements share memory")
            if stride < end:
                raise ValueError(f"out has strides {target.strides}, so that its rows overlap; give one whose do not")
            end += stride * (n - 1)
    flat = target.reshape(rows) if len(shape) == 3 else target
    direct = _rows_contiguous(flat) and (flat is target or np.may_share_memory(flat, target))
    return target, flat if direct else None


class Submitted:
    """A forward that was submitted; `KTMoEWrapper.sync_forward` gives its result, once."""

    __slots__ = ("flights", "ticket", "task", "slot", "kind", "out", "shape", "layer")


class KTMoEWrapper:
    """The routed experts of one layer: ``sum_j topk_weights[t, j] * expert[topk_ids[t, j]](hidden_states[t])``.

    Parameters
    ----------
    layer_idx : int
        Number of the decoder layer; which layer of ``weight_path`` to load.
    num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size : int
        Sizes: experts, top-k, H and I.
    gpu_experts_mask : bool array [num_experts], optional
        Which experts belong on the GPU. Without one they run on the CPU, and a warning says so.
    cpuinfer_threads : int, optional
        Threads; default: one a physical core that this process may use (`KTCY_THREADS` overrides).
    threadpool_count : int, optional
        Pools of threads, one a NUMA node; each owns a part of every expert, in its node's memory. Results do not
        depend on it.
    weight_path : str or path, optional
        Folder made by ``python -m ktcy convert``, or a Hugging Face checkpoint, or a GGUF file.
    method : str
        Weight format: ``"int8"``, ``"int4"``, ``"bf16"`` from any weights; ``"auto"`` for what the files hold; or by
        name what they must hold (``FP8``, ``GPTQ_INT4``...). kt-kernel's names mean the same: ``"AMXINT8"`` is int8.
    num_gpu_experts : int
        So many first experts belong on the GPU; must agree with ``gpu_experts_mask`` if both are given.
    chunked_prefill_size : int, optional
        Accepted for kt-kernel's callers; an input of any length works.
    cpu_save : bool
        `load_weights_from_tensors` also writes the layer to ``weight_path``.
    numa_nodes : list of int, optional
        NUMA node of each pool; default: the first nodes, or parts of the machine where it has fewer.
    swiglu_limit, swiglu_alpha : float
        Clamp and slope of the activation (kt-kernel's names); ``swiglu_alpha > 0`` means ``swigluoai``.
    activation : str or Activation, optional
        ``silu``, ``swigluoai``, ``gelu`` or ``gelu_tanh``; default: what the weights say, else ``silu``.
    variant : str, optional
        CPU variant; default: the best one here.
    cpu_infer : CPUInfer, optional
        Threads and queue to use instead of the process's shared ones of ``cpuinfer_threads`` and ``threadpool_count``.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit; the message names argument, expected and found.

    Notes
    -----
    The same bits come out for any variant, thread count, batch and position in the batch. A token whose hidden
    state holds NaN or inf, or whose gate times up overflows float32, gets NaN; an output that overflows after that,
    or in its own dtype, is inf; other tokens are untouched.
    """

    def __init__(
        self,
        layer_idx,
        num_experts,
        num_experts_per_tok,
        hidden_size,
        moe_intermediate_size,
        gpu_experts_mask=None,
        cpuinfer_threads=None,
        threadpool_count=None,
        weight_path=None,
        chunked_prefill_size=None,
        cpu_save=False,
        max_deferred_experts_per_token=None,
        method="AMXINT8",
        numa_nodes=None,
        mode="inference",
        num_gpu_experts=0,
        *,
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        activation=None,
        variant=None,
        cpu_infer=None,
    ):
        self._moe = None
        self._closed = False
        self.layer_idx = integer("layer_idx", layer_idx, 0)
        self.shape = LayerShape(num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size)
        self.method = method
        self._method = method_of(method)
        if mode != "inference":
            raise ValueError(f"mode {mode!r} is not supported; ktcy serves 'inference'")
        if max_deferred_experts_per_token:
            raise ValueError("max_deferred_experts_per_token is not supported; leave it out or pass 0")
        if chunked_prefill_size is not None:
            integer("chunked_prefill_size", chunked_prefill_size)
        pools = integer("threadpool_count", 1 if threadpool_count is None else threadpool_count, 1, 4096)
        self.gpu_experts_mask = _gpu_mask(num_gpu_experts, gpu_experts_mask, self.shape.num_experts)
        self.num_gpu_experts = int(self.gpu_experts_mask.sum())
        if self.num_gpu_experts:
            warnings.warn(
                f"{self.num_gpu_experts} experts were asked for on the GPU; all run on the CPU, for there is no GPU",
                stacklevel=2,
            )
        self.weight_path = weight_path
        self.cpu_save = cpu_save
        if swiglu_alpha or swiglu_limit:
            activation = activation or ("swigluoai" if swiglu_alpha else "silu")
        if isinstance(activation, str):
            activation = Activation.named(activation, swiglu_alpha, swiglu_limit)
        elif not isinstance(activation, (Activation, type(None))):
            raise TypeError(f"activation must be a name or an Activation, not {activation!r}")
        elif swiglu_alpha or swiglu_limit:
            raise ValueError("swiglu_alpha and swiglu_limit belong into the Activation that was given")
        self._activation = activation
        self._kernels = kernels.load(variant) if variant else kernels.default()
        if cpu_infer is None:
            threads = None if cpuinfer_threads is None else integer("cpuinfer_threads", cpuinfer_threads, 1, 4096)
            cpu_infer = shared(threads, groups=pools, numa_nodes=numa_nodes)
        elif not isinstance(cpu_infer, CPUInfer):
            raise TypeError(f"cpu_infer must be a CPUInfer, not {type(cpu_infer).__name__}")
        elif cpu_infer.closed or cpu_infer.pool.closed:
            raise ValueError("cpu_infer is closed; make a new CPUInfer")
        self.cpu_infer = cpu_infer
        self._pool = cpu_infer.pool
        self.threadpool_count = self._pool.groups
        self._flights = threading.local()  # .queue: what this thread submitted and has not taken, the oldest first

    num_experts = property(lambda self: self.shape.num_experts)
    num_experts_per_tok = property(lambda self: self.shape.num_experts_per_tok)
    hidden_size = property(lambda self: self.shape.hidden_size)
    moe_intermediate_size = property(lambda self: self.shape.moe_intermediate_size)

    @property
    def variant(self):
        """Name of the CPU variant in use."""
        return self._kernels.name

    @property
    def threads(self):
        """Number of threads in use."""
        return self._pool.threads

    @property
    def pool(self):
        """The threads in use, shared by the layers of this process that ask for as many."""
        return self._pool

    @property
    def packed(self):
        """The loaded weights, or None."""
        return self._moe.packed if self._moe else None

    def __repr__(self):
        state = "closed" if self._closed else "loaded" if self._moe else "not loaded"
        return (
            f"<KTMoEWrapper layer {self.layer_idx}: {self.num_experts} experts, top-{self.num_experts_per_tok}, "
            f"H {self.hidden_size}, I {self.moe_intermediate_size}, "
            f"{self.packed.format if self._moe else self._method} on {self.variant}, "
            f"{self.threads} threads, {state}>"
        )

    def __reduce__(self):
        raise TypeError("a KTMoEWrapper cannot be copied or pickled; make another and load its weights again")

    def _check_new(self):
        if self._closed:
            raise RuntimeError("this layer is closed")
        if self._moe is not None:
            raise RuntimeError("this layer has its weights; make another KTMoEWrapper for others")

    def load_weights(self, physical_to_logical_map_cpu=None, *, prefault=False, lock=False):
        """Takes the weights of ``weight_path``: a converted folder is mapped and used where it lies; the layer of a
        checkpoint folder or GGUF file is packed into memory.

        Parameters
        ----------
        physical_to_logical_map_cpu : int array [num_experts], optional
            Expert id of a token -> stored expert.
        prefault : bool
            Read all pages of a converted layer now, so that the first tokens do not wait for the disk.
        lock : bool
            Keep the pages of a converted layer in memory (mlock).

        Raises
        ------
        ValueError
            Without a ``weight_path``, or when it holds no such layer, other sizes or another format than ``method``.
        OSError
            For files that cannot be read or locked.
        MemoryError
            When a layer that must be packed does not fit; with figures.
        """
        self._check_new()
        expert_map = _expert_map(physical_to_logical_map_cpu, self.num_experts)
        if self.weight_path is None:
            raise ValueError("no weight_path; make a folder with: python -m ktcy convert MODEL OUT --format int8")
        if is_source(self.weight_path):
            packed = self._read()
        else:
            packed = PackedLayer.open(self.weight_path, self.layer_idx, prefault=prefault, lock=lock)
            if not method_takes(self._method, packed.format):
                raise ValueError(f"{self.weight_path} holds {packed.format} weights, but method is {self.method!r}")
            self._check_layer(packed)
        self._moe = MoE(self._kernels.format(packed.format), packed, self._pool, expert_map)

    def _read(self):
        """This layer of a model's own files, packed into memory."""
        with open_source(self.weight_path) as source:
            self._check_layer(source)
            fmt = layer_format(source, self.layer_idx, self._method, self._kernels)
            log.info(
                "layer %d of %s is packed into memory as %s; a folder made by `python -m ktcy convert` starts at once",
                *(self.layer_idx, self.weight_path, fmt.name),
            )
            return PackedLayer.read(fmt, source, self.layer_idx, self.threads)

    def _check_layer(self, held):
        """Sizes and activation of a packed layer, or of the model it is read from, against what was asked for."""
        where = f"layer {self.layer_idx} in {self.weight_path}"
        for name in ("num_experts", "hidden_size", "moe_intermediate_size"):
            found, expected = getattr(held.shape, name), getattr(self.shape, name)
            if found != expected:
                raise ValueError(f"{where} has {name} {found}, expected {expected}")
        if self._activation is not None and self._activation != held.activation:
            raise ValueError(f"the weights were made for {held.activation}, but {self._activation} was asked for")

    def load_weights_from_tensors(
        self,
        gate_proj,
        up_proj,
        down_proj,
        physical_to_logical_map_cpu=None,
        *,
        gate_bias=None,
        up_bias=None,
        down_bias=None,
    ):
        """Quantizes weights held in memory; strided views are read as they are, expert by expert.

        Parameters
        ----------
        gate_proj, up_proj : array [num_experts, I, H]
            float32, float16 or bfloat16; numpy, torch CPU or DLPack.
        down_proj : array [num_experts, H, I]
        physical_to_logical_map_cpu : int array [num_experts], optional
            Expert id of a token -> expert in these arrays.
        gate_bias, up_bias : array [num_experts, I], optional
        down_bias : array [num_experts, H], optional

        Raises
        ------
        TypeError, ValueError
            For types and shapes that do not fit, and for values that are not finite.
        """
        self._check_new()
        name = "bf16" if self._method == "auto" else self._method
        if name not in MADE:
            raise ValueError(
                f"method {self.method!r} keeps the codes of a checkpoint's own files; tensors can be packed as "
                f"{', '.join(MADE)}"
            )
        e, h, i = self.num_experts, self.hidden_size, self.moe_intermediate_size
        expert_map = _expert_map(physical_to_logical_map_cpu, e)
        arrays = [
            floats(gate_proj, "gate_proj", (e, i, h)),
            floats(up_proj, "up_proj", (e, i, h)),
            floats(down_proj, "down_proj", (e, h, i)),
        ]
        biases = {
            name: None if value is None else floats(value, name, (e, n))
            for name, value, n in (("gate_bias", gate_bias, i), ("up_bias", up_bias, i), ("down_bias", down_bias, h))
        }
        fmt = self._kernels.format(name)
        packed = PackedLayer.pack(
            fmt,
            *arrays,
            **biases,
            shape=self.shape,
            activation=self._activation or Activation(),
            layer=self.layer_idx,
            threads=self.threads,
        )
        if self.cpu_save:
            if self.weight_path is None:
                raise ValueError("cpu_save needs a weight_path to write to")
            packed.save(self.weight_path)
        self._moe = MoE(fmt, packed, self._pool, expert_map)

    def forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None, *, out=None):
        """The weighted sum of each token's experts.

        Parameters
        ----------
        hidden_states : array [T, H] or [B, S, H]
            float32, float16 or bfloat16; numpy, torch CPU or DLPack; any strides.
        topk_ids : array [T, num_experts_per_tok] or [B, S, num_experts_per_tok]
            int32 or int64. -1 means no expert; the same expert twice counts twice.
        topk_weights : array of the same shape
            float32; other float types are converted.
        cuda_stream : None
            For kt-kernel's callers; there is no GPU side to order against.
        out : array of the shape of ``hidden_states``, optional
            Written and returned; float32, float16 or bfloat16.

        Returns
        -------
        array
            Of the kind, shape and dtype of ``hidden_states``, or ``out``.

        Raises
        ------
        RuntimeError
            Before weights are loaded, after `close`, in a forked child, or with a stream.
        TypeError, ValueError
            For arrays that do not fit, and ids outside [-1, num_experts).
        """
        moe = self._loaded(cuda_stream)
        x, ids, weights, shape = self._inputs(hidden_states, topk_ids, topk_weights)
        if out is None:
            result = np.empty(x.shape, x.dtype)
            moe.forward(x, ids, weights, result)
            return like(result.reshape(shape) if len(shape) == 3 else result, hidden_states)
        target, view = _checked_out(out, shape, x.shape)
        meets = np.may_share_memory
        direct = view is not None and not (meets(target, x) or meets(target, ids) or meets(target, weights))
        result = view if direct else np.empty(x.shape, target.dtype)
        moe.forward(x, ids, weights, result)
        if not direct:
            target[...] = result.reshape(shape)
        return out

    __call__ = forward

    def submit_forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None, *, out=None):
        """Queues a forward and returns at once; `sync_forward` gives its result.

        The inputs are copied, so they are the caller's again at once; ``out`` is written until the forward is over.
        Several forwards may be in flight, of this and of other layers; they run in the order of submission. Arguments
        and errors as of `forward`.

        Returns
        -------
        Submitted
            For `sync_forward`.
        """
        moe = self._loaded(cuda_stream)
        x, ids, weights, shape = self._inputs(hidden_states, topk_ids, topk_weights)
        target, view = (None, None) if out is None else _checked_out(out, shape, x.shape)
        slot = _buffers.take(*x.shape, ids.shape[1], x.dtype)
        for copy, source in zip(slot, (x, ids, weights)):
            copy[...] = source
        result = view
        if result is None:
            result = np.empty(x.shape, x.dtype if target is None else target.dtype)
        flight = Submitted()
        flight.task = moe.task(*slot, result, keep=True)
        flight.slot, flight.layer, flight.shape = slot, self, shape
        flight.out = None if out is None else (out, None if result is view else target)
        flight.kind = hidden_states if is_torch(hidden_states) else None
        flight.flights = self._flights.__dict__.setdefault("queue", deque())
        flight.ticket = self.cpu_infer.submit(flight.task)
        flight.flights.append(flight)
        return flight

    def sync_forward(self, hidden_states=None, cuda_stream=None):
        """The result of a submitted forward, when it is over.

        Parameters
        ----------
        hidden_states : Submitted, optional
            What `submit_forward` returned, in any thread. Anything else, as kt-kernel's callers pass, means the oldest
            forward that this thread submitted to this layer.
        cuda_stream : None
            As of `forward`.

        Returns
        -------
        array
            Of the kind, shape and dtype that were submitted, or ``out``. It is the caller's: no later call changes it.

        Raises
        ------
        RuntimeError
            When nothing was submitted or the result was taken already, or after `close`.
        ValueError
            For ids outside [-1, num_experts) in what was submitted, and for a forward of another layer.
        KeyboardInterrupt
            On Ctrl-C; the forward goes on, and its result can be asked for again.
        """
        self._loaded(cuda_stream)
        if isinstance(hidden_states, Submitted):
            flight = hidden_states
            if flight.layer is not self:
                raise ValueError(f"this forward was submitted to {flight.layer!r}; ask that layer for its result")
            try:
                flight.flights.remove(flight)
            except ValueError:
                raise RuntimeError("the result of this forward was taken already") from None
        else:
            try:
                flight = self._flights.queue.popleft()
            except (AttributeError, IndexError):
                raise RuntimeError(
                    "no forward was submitted to this layer by this thread; call submit_forward first, or pass what it "
                    "returned in another thread"
                ) from None
        try:
            self.cpu_infer.wait(flight.ticket)
        except BaseException:
            flight.flights.appendleft(flight)
            raise
        _buffers.give(flight.slot)
        result = flight.task.result()
        if len(flight.shape) == 3:
            result = result.reshape(flight.shape)
        if flight.out is None:
            return like(result, flight.kind)
        out, target = flight.out
        if target is not None:
            target[...] = result
        return out

    @staticmethod
    def set_capture_batch_sizes(sizes):
        """Token counts whose buffers are kept for ever, instead of only while they are the last used."""
        _buffers.set_capture(sizes)

    @staticmethod
    def get_capture_batch_sizes():
        """The token counts of `set_capture_batch_sizes`, ascending."""
        return _buffers.capture()

    @staticmethod
    def clear_buffer_cache():
        """Drops the buffers of submitted forwards that nobody uses now."""
        _buffers.clear()

    def _loaded(self, cuda_stream):
        moe = self._moe
        if moe is None:
            raise RuntimeError("this layer is closed" if self._closed else "call load_weights() first")
        if cuda_stream:
            raise RuntimeError("a cuda_stream was given, but these are CPU tensors and ktcy has no GPU here; pass None")
        return moe

    def _inputs(self, hidden_states, topk_ids, topk_weights):
        """The three arrays as MoE takes them: checked, hidden states with contiguous rows, weights float32; and the
        shape of the result."""
        x = as_numpy(hidden_states, "hidden_states")
        shape = x.shape
        if len(shape) == 3:
            x = x.reshape(shape[0] * shape[1], shape[2])
        x = floats(x, "hidden_states", (None, self.shape.hidden_size))
        ids = as_numpy(topk_ids, "topk_ids")
        if ids.dtype not in (np.int64, np.int32):
            raise TypeError(f"topk_ids is {ids.dtype}; int32 and int64 are supported")
        weights = as_numpy(topk_weights, "topk_weights")
        if weights.dtype.kind != "f" and weights.dtype not in FLOATS:
            raise TypeError(f"topk_weights is {weights.dtype}; a float type is needed")
        expected = (x.shape[0], self.shape.num_experts_per_tok)
        if len(shape) == 3:
            whole = (*shape[:2], self.shape.num_experts_per_tok)
            ids, weights = (a.reshape(expected) if a.shape == whole else a for a in (ids, weights))
        for name, array in (("topk_ids", ids), ("topk_weights", weights)):
            if array.shape != expected:
                raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(expected)} (tokens, top-k)")
        if weights.dtype != np.float32:
            with np.errstate(over="ignore"):
                weights = weights.astype(np.float32)
        if not _rows_contiguous(x):
            x = np.ascontiguousarray(x)
        return x, ids, weights, shape

    def close(self):
        """Lets go of the weights; closing twice is fine. The shared threads stay for other layers."""
        self._moe = None
        self._flights = threading.local()
        self._closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
