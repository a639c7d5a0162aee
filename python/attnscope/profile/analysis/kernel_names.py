"""From a kernel symbol: a readable name, a category, and whether the kernel uses tensor cores.

Only the symbol is read, so the same symbol always gives the same result.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import cache

CATEGORIES = (
    "GEMM", "attention", "softmax", "elementwise", "reduction", "norm", "memory",
    "communication", "other",
)  # fmt: skip

# Maximum length of a short name. Longer names are cut; a checksum keeps them distinct.
LONGEST = 72

_TYPES = {
    "c10::BFloat16": "bf16", "__nv_bfloat16": "bf16", "cutlass::bfloat16_t": "bf16",
    "c10::Half": "fp16", "__half": "fp16", "cutlass::half_t": "fp16",
    "c10::complex<float>": "c64", "c10::complex<double>": "c128",
    "c10::Float8_e4m3fn": "e4m3", "cutlass::float_e4m3_t": "e4m3",
    "c10::Float8_e5m2": "e5m2", "cutlass::float_e5m2_t": "e5m2",
    "unsigned char": "u8", "signed char": "i8", "unsigned int": "u32", "unsigned long": "u64",
    "float": "fp32", "double": "fp64", "long": "i64", "int": "i32", "short": "i16",
    "bool": "bool",
}  # fmt: skip
_TYPE = re.compile(rf"(?<![\w:])(?:{'|'.join(map(re.escape, _TYPES))})(?!\w)")


@cache
def short_name(symbol: str) -> str:
    """A readable name of at most LONGEST characters, distinct for different kernels.

    Families with a naming scheme are written as words: "attnscope sm90 forward bf16 D128 M128",
    "FA3 forward bf16 D64 tile 192x128 causal", "efficient attention forward bf16 tile 64x128 rf
    sm80", "elementwise add<bf16> vec8". Names that are already short (nvjet, Triton, cuBLAS,
    copies) are unchanged and stay searchable. Other C++ functions keep their last name and template
    arguments, without namespaces.
    """
    for pattern, shorten in _FAMILIES:
        if match := pattern.search(symbol):
            return _cut(shorten(symbol, match))
    return _cut(_function(symbol))


def _cut(name: str) -> str:
    name = " ".join(name.split())
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 8]}~{zlib.crc32(name.encode()) & 0xFFFFFFF:07x}"


def _dtype(text: str) -> str:
    """The first type in a piece of a symbol, abbreviated; "" if there is none."""
    found = _TYPE.search(text)
    return _TYPES[found[0]] if found else ""


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _attnscope(symbol: str, match: re.Match[str]) -> str:
    arch, op, dtype, sizes = match.groups()
    parts = op.split("_")
    if {"backward", "preprocess", "postprocess"} & set(parts):
        wide = ["wide"] if "WideConfig<" in symbol else []
        parts = ["backward", *wide, *(part for part in parts if part not in ("backward", "wide"))]
    tile = [f"{letter}{size}" for letter, size in zip("DMN", _ints(sizes or ""), strict=False)]
    if len(tile) == 1 and tile[0] in _TILE_ROWS:
        tile = [f"tile {tile[0][1:]}"]
    grouped = "grouped" if "::Grouped" in symbol else ""
    divided = "divided keys" if "SplitForwardConfig<" in symbol else ""
    split = "parts" if "WithParts<" in symbol else ""
    return _words("attnscope", arch, *parts, _dtype(dtype), *tile, grouped, divided, split)


def _attnscope_triton(symbol: str, match: re.Match[str]) -> str:
    op, dtype, dim, dim_v, mask = match.groups()
    dims = f"D{dim}" if dim == dim_v else _words(dim and f"D{dim}", f"Dv{dim_v}")
    return _words("attnscope triton", op.replace("_", " "), dtype, dims, mask.strip("_"))


def _fa3(symbol: str, match: re.Match[str]) -> str:
    """Template arguments of CollectiveMainloop{Fwd,Bwd}Sm90: stages, cluster, tile, ... flags."""
    cluster, tile = (_ints(t.replace("cute::C", "")) for t in _TUPLE.findall(symbol)[:2])
    which = "forward" if match[1] == "Fwd" else "backward"
    # Flags without a name here follow from the tile: how the products are scheduled.
    names = {
        "forward": ("paged", "append", "qv", "", "", "pack-gqa", "split"),
        "backward": ("deterministic",),
    }[which]
    names = ("causal", "local", "softcap", "varlen", *names)
    flags = _flags(symbol, r"cutlass::arch::Sm\d+", names)
    if cluster[0] > 1:
        flags.append(f"cluster {cluster[0]}")
    dtype, (rows, cols, dim) = _dtype(symbol[match.end() :]), tile
    return _words("FA3", which, dtype, f"D{dim}", f"tile {rows}x{cols}", *flags)


def _fa3_side(symbol: str, match: re.Match[str]) -> str:
    """The kernels before and after a backward: a tile of queries and the head dim."""
    kind = match[1].removesuffix("ConvertdQ").lower()
    rows, dim = _ints(_TUPLE.findall(symbol)[0].replace("cute::C", ""))[:2]
    return _words("FA3 backward", kind, _dtype(symbol[match.end() :]), f"D{dim}", f"tile {rows}")


def _fa2(symbol: str, match: re.Match[str]) -> str:
    """Template arguments: kernel traits <D, M, N, warps, ..., dtype>, then flags of the mask."""
    owner, way, kind = match.groups()
    which = "forward" if way == "fwd" else "backward"
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+), [^<>]*?(cutlass::\w+)", symbol)
    name = _words("torch FA2" if owner == "pytorch_flash" else "FA2", which)
    name = _words(name, kind.strip("_").replace("splitkv", "split-kv").replace("_", " "))
    if traits is None:
        return name
    name = _words(name, _dtype(traits[4]), f"D{traits[1]}", f"tile {traits[2]}x{traits[3]}")
    if "dot_do_o_kernel<false" in symbol:  # deterministic: dQ is zeroed elsewhere
        return f"{name} keeps dQ"
    # The combine kernel has a row block and log2 of the most splits in place of the flags.
    if splits := re.search(r" >, \d+, (\d+), (?:true|false)>", symbol):
        return f"{name} {2 ** int(splits[1])} splits"
    # "even": no row is past the end of its tile; "uneven D": the head dim does not fill it.
    flags: tuple[str, ...] = ("causal", "local", "alibi", "even", "!uneven D", "softcap")
    if "splitkv" in kind:
        flags = (*flags, "!one split", "append")
    else:
        flags = ("dropout", *flags, "return softmax")
    return _words(name, *_flags(symbol, " >", flags))


def _fa4(symbol: str, match: re.Match[str]) -> str:
    """CuTe's names contain little but tensor layouts: a checksum makes the short name distinct."""
    which, part = match[1].lower(), match[2].lower()
    return f"FA4 {which} {part} layouts {zlib.crc32(symbol.encode()) & 0xFFFFFFF:07x}"


def _efficient(symbol: str, match: re.Match[str]) -> str:
    """Tile: queries x keys. rf or gmem: where the output is accumulated; k64: maximum head dim."""
    which = "forward" if match[1] == "F" else "backward"
    dtype = {"f16": "fp16", "f32": "fp32"}.get(match[2], match[2])
    aligned = "" if match[3] == "aligned" else "unaligned"
    rest = match[5].replace("_", " ")
    return _words("efficient attention", which, dtype, f"tile {match[4]}", rest, aligned)


def _flags(symbol: str, before: str, names: tuple[str, ...]) -> list[str]:
    """The names of the boolean template arguments after `before` that are true.

    A name "!x" is returned if the argument is false; a name "" is never returned.
    """
    found = re.search(before + r"((?:, (?:true|false))+)", symbol)
    values = found[1].split(", ")[1:] if found else []
    return [
        name.removeprefix("!")
        for name, value in zip(names, values, strict=False)
        if name and (value == "false") == name.startswith("!")
    ]


def _cudnn_sdpa(symbol: str, match: re.Match[str]) -> str:
    arch, way, rest = match.groups()
    rest = re.sub(r"wgmma_|_kernel\d+_\d+$", "", rest).replace("_", " ")
    return _words("cuDNN sdpa", arch, {"f": "forward", "b": "backward"}[way], rest)


def _elementwise(symbol: str, match: re.Match[str]) -> str:
    kind, width = match.groups()
    arguments = symbol[match.end() :]
    how = {"vectorized_": f"vec{width}", "unrolled_": "unrolled", None: "strided"}.get(kind, kind)
    return _words(f"elementwise {_functor(arguments)}", (how or "").strip("_"))


def _reduce(symbol: str, match: re.Match[str]) -> str:
    arguments = symbol[match.end() :]
    named = r"(\w+?)(?:(?:_functor|Ops|NanFunctor|Functor)\b|_kernel_(?:cuda|impl)\()"
    what = re.search(named, arguments)
    width = "" if match[1] == "1" else f"vec{match[1]}"
    return _words(f"reduce {what[1] if what else ''}<{_dtype(arguments)}>", width)


def _multi_tensor(symbol: str, match: re.Match[str]) -> str:
    functor = re.search(r"(\w+?)Functor\w*<", symbol[match.end() :])
    what = re.search(r"(?:std::|native::)(\w+)<\w+> ?[,>]", symbol[match.end() :])
    operation = what[1] if what and what[1] != "TensorListMetadata" else ""
    dtype = _dtype(symbol[match.end() + functor.end() :]) if functor else ""
    return _words("multi_tensor", functor[1] if functor else "", operation) + f"<{dtype}>"


def _functor(arguments: str) -> str:
    """The operation of an elementwise kernel and the type it loads: "mul scalar<bf16>"."""
    scalar = " scalar" if re.match(r"[^(]*?(?:[AB]UnaryFunctor|FunctorOnSelf)", arguments) else ""
    if named := re.search(r"CUDAFunctor(?:OnSelf)?_(\w+)", arguments):
        return f"{named[1]}{scalar}<{_dtype(arguments)}>"
    # Unary and binary functors wrap the functor that names the operation.
    if named := re.search(r"\b(?!(?:[AB]Unary|Binary)Functor)(\w+?)Functor\w*<", arguments):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", named[1]).lower()
        return f"{name}{scalar}<{_dtype(arguments)}>"
    if named := re.search(r"(\w+?)(?:<[^()]*>)?\((?:at::TensorIterator|at::native)", arguments):
        name = re.sub(r"^launch_|(_?(kernel|cuda|impl))+$", "", named[1], flags=re.IGNORECASE)
        lambdas = re.findall(r"\{lambda\(([^()]+)\)#", arguments)
        typed = [text for text in lambdas if _dtype(text) and text != "int"] or lambdas
        # A bool beside another type is a mask.
        values = re.sub(r"\bbool, |, bool\b", "", typed[0]) if typed else ""
        return f"{name}<{_dtype(values)}>"
    return _function(arguments)


def _gemm(symbol: str, match: re.Match[str]) -> str:
    """The part of a cuBLAS or CUTLASS name between the kernel type and the alignment."""
    name = re.sub(r"_execute.*|_align[abc]?\d+|_warpsize(\d+x)*\d+", "", match[0])
    return name.replace("_tilesize", "_")


def _function(symbol: str) -> str:
    """Last name of a C++ function and its template arguments, without namespaces."""
    text = symbol.replace("(anonymous namespace)::", "")
    text = re.sub(r"^void ", "", _TYPE.sub(lambda found: _TYPES[found[0]], text))
    depth, end = 0, len(text)
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and at:
            end = at
            break
    text = re.sub(r"(?<!\w)(?:\w+::)+", "", text[:end])
    return re.sub(r"\s+>", ">", re.sub(r"_kernel(?=<|$)", "", text))


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _same(symbol: str, match: re.Match[str]) -> str:
    return match[0]


# A single number below every head dim is the row of a kernel's table of tiles.
_TILE_ROWS = frozenset(f"D{row}" for row in range(8))
_TUPLE = re.compile(r"cute::tuple<((?:cute::C<\d+>(?:, )?)+) ?>")
# The first that is found in a symbol names it.
_FAMILIES: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), shorten)
    for pattern, shorten in (
        (
            r"attnscope::(sm\d+)::(\w+)_kernel<(?:attnscope::\w+::\w+<)*([\w:]+)((?:, \d+)*)",
            _attnscope,
        ),
        (
            r"^attnscope_triton_(\w+?)_(bf16|fp16|fp32)(?:_d(\d+))?_dv(\d+)(\w*)",
            _attnscope_triton,
        ),
        (r"FlashAttnBwd(Preprocess|PostprocessConvertdQ)<", _fa3_side),
        (r"FlashAttn(Fwd|Bwd)Sm\d+<flash::CollectiveMainloop", _fa3),
        (r"(\w+)::flash_(fwd|bwd)_(\w*?)_?kernel", _fa2),
        (r"flash_attncute\w*?FlashAttention(Forward|Backward)([A-Za-z]+\d*)_", _fa4),
        (r"fmha_cutlass([FB])_([a-z]+\d+)_(\w*aligned)_(\d+x\d+)_(\w+)", _efficient),
        (r"^cudnn_generated_\w*sdpa_(sm\d+)_flash_([fb])prop_(\w+)", _cudnn_sdpa),
        (
            r"cudnn::fusion::(\w+)<\w+(?:, (\d+))?",
            lambda symbol, match: _words("cuDNN sdpa", match[1], match[2] and f"D{match[2]}"),
        ),
        (r"^nvjet_\w+", _same),
        (r"\w*(?:xmma_|cutlass_\d|cutlass3x_)\w*gemm\w*", _gemm),
        (r"multi_tensor_apply_kernel<", _multi_tensor),
        (r"native::(vectorized_|unrolled_|\w+_)?elementwise_kernel<(\d*)", _elementwise),
        (r"native::reduce_kernel<\d+, (\d+), ", _reduce),
        (r"^(\w+|Mem(cpy|set).*)$", _same),
    )
)

# The first match decides; case is ignored. communication: collectives and transfers between GPUs. A
# convolution counts as an (implicit) GEMM, a causal 1D convolution (Mamba) does not. Optimizers
# (foreach and fused, multi_tensor_apply) are elementwise; their range identifies them. memory: the
# kernel moves or fills data without arithmetic; a dtype cast counts as a copy. Masks (where,
# masked_fill, triu, tril) select between values, so they are elementwise.
_CATEGORIES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        ("memory", r"^mem(cpy|set)\b"),
        # Inductor's names list every fused op; the first part gives the type of kernel.
        ("elementwise", r"^triton_poi_"),
        ("softmax", r"^triton_(red|per)_\w*softmax"),
        ("norm", r"^triton_(red|per)_\w*norm"),
        ("reduction", r"^triton_(red|per)_"),
        (
            "communication",
            r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep::"
            r"|symm_mem|cross_device_reduce|multimem_",
        ),
        ("other", r"causal_conv1d"),
        (
            "attention",
            r"attnscope|flash_(fwd|bwd)|flashattn|sdpa|fmha|attention|flash_bwd|_?attn_(fwd|bwd)"
            r"|flashinfer::.*(prefill|decode|mla|cascade)|Batch(Prefill|Decode)With|paged_attn"
            r"|flash_?mla"
            r"|cudnn::fusion::(compute_dot_do_o|convert_dq)|flash::prepare_varlen",
        ),
        ("softmax", r"softmax"),
        ("norm", r"(layer|rms|batch|group|instance)_?norm|GammaBeta|cudnn::bn_|RowwiseMoments"),
        (
            "GEMM",
            r"nvjet|^Cijk_|(?<!fb)gemm|gemv|splitkreduce|matmul|conv(olve|olution|1d|2d|3d|_)|[fdw]prop_"
            r"|[dw]grad|triton_tem_|_b?mm(_|$)|cutlass.*tensorop|fused_moe_kernel|_scudnn_"
            r"|winograd",
        ),
        (
            "memory",
            r"CatArray|copy_kernel|FillFunctor|gather|indexSelect|index_elementwise|index_kernel"
            r"|scatter|transpose|nchwToNhwc|nhwcToNchw|embedding_codegen_forward",
        ),
        ("reduction", r"reduce(?!d_)|LpNorm|dot_kernel|embedding_backward"),
        ("elementwise", r"elementwise|multi_tensor_apply|dropout|triu_tril"),
    )
)

_HELPERS = re.compile(
    r"combine|dot_do_o|convert_d|preprocess|postprocess|prepare|splitKreduce", re.IGNORECASE
)
_TENSOR_CORES = re.compile(
    r"attnscope::\w+::(\w+_)?(forward|backward|decode)_kernel|^attnscope_triton_(?!backward_stats)"
    r"|FlashAttn(Fwd|Bwd)|FlashAttention(Forward|Backward)Sm|flash_(fwd|bwd)_"
    r"|^nvjet_|w?gmma|[hi]mma|(?<![a-z])dmma|tensor\d+x\d+x\d+|warpgroupsize|tensorop"
    r"|[shid](884|1688|16816|8816|16832|64x\d+x\d+)(?=gemm|fprop|dgrad|wgrad|_|$)"
    r"|fmha_cutlass[FB]_\w+_sm(8|9|1\d)\d|fmha_cutlass[FB]_f16\w*_sm7\d"
    r"|^triton_tem_"
)


@cache
def category(symbol: str) -> str:
    """One of CATEGORIES; names of copies and memsets ("Memcpy DtoH ...") are accepted too."""
    for name, pattern in _CATEGORIES:
        if pattern.search(symbol):
            return name
    return "other"


@cache
def uses_tensor_cores(symbol: str) -> bool:
    """Whether a kernel's matrix products run on tensor cores, according to its symbol.

    Counted: attention kernels written with mma or wgmma (attnscope, FlashAttention 2 to 4, cuDNN,
    memory-efficient on sm_80 and later), nvjet, cuBLAS and CUTLASS kernels that name a tensor
    instruction (tensorop, s16816, hmma, wgmma, tensor16x8x8, warpgroupsize), and Inductor's matrix
    templates. Not counted: FFMA kernels of the same families ("xmma ... ffma", "simt"), the helpers
    around attention (combine, preprocess, statistics, conversion), and every symbol that leaves it
    open: the share of tensor-core time is a lower bound.
    """
    return bool(_TENSOR_CORES.search(symbol)) and not _HELPERS.search(symbol)
