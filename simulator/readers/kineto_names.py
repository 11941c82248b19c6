"""What names in Kineto traces mean: kernels by kind, runtime calls of CUDA and HIP, collectives, number formats."""

import re

from simulator.specs.recording import CallKind, KernelKind

# First match wins. Names of cuBLAS, cuDNN, CUTLASS, rocBLAS (Tensile's "Cijk"), ATen, Apex, FBGEMM, Triton (Inductor).
_KERNEL_WORDS: tuple[tuple[KernelKind, tuple[str, ...]], ...] = (
    (KernelKind.COLLECTIVE, ("ncclkernel", "nccldevkernel", "ncclsymkernel", "rccl", "mscclkernel")),
    (KernelKind.OPTIMIZER, ("multi_tensor_apply", "multitensor", "adam", "fused_sgd", "lamb_", "adagrad")),
    (KernelKind.ATTENTION, ("flash", "fmha", "attention", "attend")),
    (
        KernelKind.NORMALISATION,
        ("layer_norm", "layernorm", "batch_norm", "bn_fw", "bn_bw", "batchnorm", "rmsnorm", "moments", "gammabeta"),
    ),
    (KernelKind.SOFTMAX, ("softmax",)),
    (
        KernelKind.CONVOLUTION,
        (
            "convol",
            "conv2d",
            "conv_",
            "cudnn",
            "implicit_gemm",
            "fprop",
            "dgrad",
            "wgrad",
            "winograd",
            "scudnn",
            "nchwtonhwc",
            "nhwctonchw",
        ),
    ),
    (
        KernelKind.MATRIX_PRODUCT,
        (
            "gemm",
            "cijk_",
            "cublas",
            "addmm",
            "aten::mm",
            "aten::bmm",
            "cutlass",
            "matmul",
            "splitkreduce",
            "gemv",
            "nvjet",
        ),
    ),
    (
        KernelKind.GATHER_SCATTER,
        (
            "index",
            "gather",
            "scatter",
            "embedding",
            "permute_",
            "split_embedding",
            "batched_unary",
            "asynchronous_",
            "sort",
            "compute_cuda_kernel",
        ),
    ),
    (
        KernelKind.REDUCTION,
        ("reduce_kernel", "reduction", "norm_kernel", "cumsum", "scan", "nll_loss", "triton_red", "triton_per"),
    ),
    (
        KernelKind.ELEMENTWISE,
        ("elementwise", "catarray", "fused_dropout", "distribution", "pooling", "pool", "triton_", "copy_kernel"),
    ),
)

_CALLS = {
    "StreamSynchronize": CallKind.STREAM_SYNC,
    "EventSynchronize": CallKind.EVENT_SYNC,
    "DeviceSynchronize": CallKind.DEVICE_SYNC,
    "CtxSynchronize": CallKind.DEVICE_SYNC,
    "StreamWaitEvent": CallKind.WAIT_EVENT,
    "EventRecord": CallKind.RECORD_EVENT,
    "EventRecordWithFlags": CallKind.RECORD_EVENT,
}
_LAUNCHES = re.compile(r"(cuda|hip|cu)(Ext)?(Module)?(Launch|Memcpy|Memset|Graph)")

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}

_BYTES = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "longint": 8,
    "cdouble": 16,
    "cfloat": 8,
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "float16": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "signedchar": 1,
    "unsignedchar": 1,
    "uint8": 1,
}


def kernel_kind(name: str, operator: str = "") -> KernelKind:
    """Return what a kernel does, by its name, else by that of the operator that launched it."""
    kind = _kind_of(name)
    return _kind_of(operator) if kind is KernelKind.OTHER and operator else kind


def operator_kind(name: str) -> KernelKind:
    """Return what an operator of PyTorch does on a CPU, by its name; else those of ATen work element by element."""
    kind = _kind_of(name)
    return KernelKind.ELEMENTWISE if kind is KernelKind.OTHER and name.startswith("aten::") else kind


def _kind_of(name: str) -> KernelKind:
    lowered = name.lower()
    for kind, words in _KERNEL_WORDS:
        if any(word in lowered for word in words):
            return kind
    return KernelKind.OTHER


def call_kind(name: str) -> CallKind:
    """Return what a runtime call does, by its name in CUDA or HIP."""
    stem = re.sub(r"^(cuda|hip|cu)", "", name)
    if stem in _CALLS:
        return _CALLS[stem]
    return CallKind.LAUNCH if _LAUNCHES.match(name) else CallKind.OTHER


def collective_operation(name: str) -> str | None:
    """Return the collective in a name such as "nccl:_all_gather_base"; None if there is none."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((operation for word, operation in _COLLECTIVES.items() if word in letters), None)


def element_bytes(dtype: str) -> int | None:
    """Return the bytes of a number as PyTorch or c10d spell its format; None where unknown."""
    word = dtype.lower().removeprefix("c10::").replace(" ", "")
    return _BYTES.get(word.removeprefix("tensor(").removesuffix(")"))
