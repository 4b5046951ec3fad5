"""How fast attention's products run over keys and values in several layouts on this machine."""

from kvlab.claims.timed import Program, TwoLayouts
from kvlab.locality import products


class ProductTime(TwoLayouts, frozen=True, kw_only=True):
    """By which factor both products of decode attention are faster over `layout` than over `against`, in float32, all tokens.

    Attributes:
      tokens, kv_heads, queries, head_dim: of one layer and row; queries per KV head.
    """

    tokens: int = 8192
    kv_heads: int = 4
    queries: int = 4
    head_dim: int = 128

    def said(self) -> str:
        return f"both products over {self.layout} against {self.against} "

    def over(self, layout: str) -> Program:
        rows = products.Rows(self.tokens, self.kv_heads, self.queries, self.head_dim, self.head_dim, "float32")
        return Program(layout, products.laid_out(rows, layout), rows.useful)
