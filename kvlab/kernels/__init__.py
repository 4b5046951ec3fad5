"""Decode attention as Pallas kernels over a layout's own leaves: what there is, by layout, codecs and operation.

`Policy.implementation` names what runs: "xla" (no kernel, `kvlab.reading` alone), "triton", "tpu" or "interpret". Queries of
single tokens over coded pages always go through a kernel then. Where there is a kernel for it, a full page is committed by one
(`commit.covers`: layouts whose pages lie apart), and `hysparse` scores pages by one (`gate`). Prompts are prefilled as the engine
says (`prefill`). Chunks, the raw tail, and what else a retention or a selection reads for itself are XLA's in each.
"""

from kvlab.core import Tokens
from kvlab.errors import RefusedPolicy
from kvlab.kernels import backends, codes, decode, places
from kvlab.kernels.backends import BACKENDS
from kvlab.kernels.decode import Kernel
from kvlab.layout import LAYOUTS, Bicl, Contiguous, Paged, PageMajor

PLACES = {
    Contiguous: lambda layout, memory, pages, dim: places.Contiguous(dim, pages=pages),
    PageMajor: lambda layout, memory, pages, dim: places.PageMajor(dim),
    Paged: lambda layout, memory, pages, dim: places.Paged(dim),
    Bicl: lambda layout, memory, pages, dim: places.Bicl(dim, layout.side(pages), "tiles" in memory),
}
OPERATIONS = ("all", "pages")  # every page that holds something, or those that a list names
KERNELS: dict[tuple[type, str, str, str], Kernel] = {
    (layout, keys, values, operation): Kernel(place, codes.NUMBERS[keys], codes.NUMBERS[values])
    for layout, place in PLACES.items()
    for keys in codes.NUMBERS
    for values in codes.NUMBERS
    for operation in OPERATIONS
}


def why_not(policy) -> str | None:
    """Why no kernel serves a policy, with the ways out; None where one does."""
    how, out = policy.implementation, 'write implementation = "xla"'
    if how == "xla":
        return None
    if reason := backends.unknown(how):
        return reason
    if type(policy.layout) not in PLACES:
        known = ", ".join(name for name, cls in LAYOUTS.items() if cls in PLACES)
        return f"no kernel reads {policy.layout}; allowed: {known}; or {out}"
    for side, codec in (("keys", policy.codec.keys), ("values", policy.codec.values)):
        if codes.name(codec) is None:
            return f"no kernel reads {side} of {codec}; allowed: raw, int8, fp8, and hadamard around them; or {out}"
    if policy.retention.uneven:
        return f"{policy.retention} gives heads unequal budgets, whose pages lie in one pool that no kernel reads; {out}"
    if policy.selection.single:
        return _single(policy.selection)
    return None


def find(policy, operation: str) -> Kernel:
    """The kernel of a policy that `why_not` says nothing against."""
    keys, values = (codes.name(codec) for codec in (policy.codec.keys, policy.codec.values))
    assert keys is not None and values is not None
    return KERNELS[type(policy.layout), keys, values, operation]


def read(policy, cache, query_BHGD, pos_B, spec, picked, splits: int | None = None, by_page: bool = False):
    """One token's scaled queries, as `Codec.query` made them, over the codes of the pages `picked`, or of all: by the kernel
    that `policy.implementation` names. The partial, and with `by_page` what `Kernel` says of pages.

    Errors: RefusedPolicy where single tokens were picked, and where the back end cannot hold the head dimension.
    """
    if isinstance(picked, Tokens):
        raise RefusedPolicy(_single(policy.selection))
    index = picked.index
    kernel = find(policy, OPERATIONS[index is not None])
    told = decode.facts(cache, pos_B, policy.unit, policy.retention.visibility(), spec, policy.tailed, index)
    backend = BACKENDS[policy.implementation]
    return kernel(backend, policy.layout, cache.memory, query_BHGD, cache.pos, told, spec, index, splits, by_page)


def _single(selection) -> str:
    return f'{selection} picks single tokens, but kernels read whole pages; let it pick pages, or write implementation = "xla"'
