"""Which model, and how it is computed: the first group of settings, see ``kvtrio.config``."""

from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

MODEL = Group("Model", sort_key=1)
CacheType = Literal["f16", "f32", "q8_0", "q4_0"]


@Parameter(name="*", group=MODEL)
@frozen(kw_only=True)
class ModelSettings:
    """Which model, and how it is computed."""

    model: Annotated[
        str | None,
        Parameter(name=["--model", "-m"], help="The same as MODEL, under llama-server's name."),
    ] = None
    alias: Annotated[
        str | None,
        Parameter(
            name=["--alias", "-a"],
            help="Name of the model in answers. Default: the file's name without its ending.",
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        Parameter(
            name=["--ctx-size", "-c"],
            validator=Number(gte=2),
            help="Longest request, prompt and answer together, in tokens. "
            "Default: the model's own limit, at most 8192.",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Parameter(
            name="--chat-template",
            help="A built-in template's name, or a file with a Jinja template. "
            "Default: the template in the model file.",
        ),
    ] = None
    quantize: Annotated[
        Literal["q8_0", "q4_0"] | None,
        Parameter(
            name="--quantize",
            help="Compute with the matrices of a model in F32, F16 or BF16, a Hugging Face folder "
            "say, in fewer bits. Made at the first start and kept in the cache folder. Default: as "
            "stored.",
        ),
    ] = None
    backend: Annotated[
        str | None,
        Parameter(
            name="--backend",
            help="What computes: cpu (compiled kernels, weights in the file's types), torch (the "
            "reference), sim (answers nonsense without computing, for tests), or an installed "
            "plug-in. Default: cpu; torch where the kernels are not built, or for --dtype or "
            "another --device.",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "f32"] | None,
        Parameter(
            name="--dtype",
            help="Type of backend torch's arithmetic and KV cache. Default: bf16.",
        ),
    ] = None
    cache_type_k: Annotated[
        CacheType | None,
        Parameter(
            name=["--cache-type-k", "-ctk"],
            help="Type of backend cpu's keys in the KV cache. Default: f16.",
        ),
    ] = None
    cache_type_v: Annotated[
        CacheType | None,
        Parameter(
            name=["--cache-type-v", "-ctv"],
            help="Type of backend cpu's values in the KV cache. Default: f16.",
        ),
    ] = None
    device: Annotated[
        str, Parameter(name="--device", help="Where to compute, in torch's words: cpu, cuda, ...")
    ] = "cpu"
    gpu_memory_fraction: Annotated[
        float | None,
        Parameter(
            name="--gpu-memory-fraction",
            validator=Number(gt=0, lte=1),
            help="Of all memory of a GPU, what backend cuda may take for weights, steps, state and "
            "adapters together; state gets what the others leave. Default: 0.9.",
        ),
    ] = None
    tensor_split: Annotated[
        str | None,
        Parameter(
            name=["--tensor-split", "-ts"],
            help="Backend cuda's layers on several GPUs, from the first on, in these proportions: "
            "3,1 puts three quarters on the first. Default: all on one.",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        Parameter(
            name="--cuda-graphs",
            negative="--no-cuda-graphs",
            help="Backend cuda captures steps without prompts at the start, of up to 256 "
            "requests, and launches each as a whole; not with --tensor-split. Default: yes.",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Parameter(
            name=["--threads", "-t"],
            validator=Number(gte=1),
            help="Threads that compute. Default: as many as the machine has cores.",
        ),
    ] = None
