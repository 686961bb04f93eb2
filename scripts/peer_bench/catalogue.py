"""Which line of the peers' scripts stands beside which row of `ctxcache bench host`: the only place that knows."""

from __future__ import annotations

from dataclasses import dataclass

VLLM, SGLANG = "vLLM", "SGLang"


@dataclass(frozen=True, slots=True)
class PeerLine:
    """One line that the peers' scripts print.

    Attributes:
        work: the row's, in `ctxcache.cli.bench.host.bounds.WORKS`.
        peer: whose code.
        way: how, where a peer has several.
        label: of the line, with `{block}` where the block size stands.
        counts: whether it does all that the row does, so that it may be the best; else it is shown only.
    """

    work: str
    peer: str
    way: str
    label: str
    counts: bool = True

    @property
    def name(self) -> str:
        """Peer and way in one."""
        return f"{self.peer} {self.way}".strip()


LINES = (
    PeerLine("hash", SGLANG, "native SHA-256", "(a) native C++ sha256 page-hash page{block} n32768"),
    PeerLine("hash", VLLM, "SHA-256", "(a) hash sha256 bs{block} n32768"),
    PeerLine("hash", VLLM, "xxHash", "(a) hash xxhash bs{block} n32768"),
    PeerLine(
        "hit", SGLANG, "Rust tree", "(b) rust full-hit match+lock+gather indices+unlock page{block} n32768"
    ),  # it hashes nothing
    PeerLine(
        "hit", SGLANG, "Rust tree, match alone", "(b) rust full-hit match (1 node) page{block} n32768", counts=False
    ),
    PeerLine("hit", VLLM, "", "(b) full-hit hash+lookup sha256 bs{block} n32768"),
    PeerLine("hit", VLLM, "hashes ready", "(b) full-hit lookup+lease+free (hashes ready) bs{block} n32768"),
    PeerLine(
        "insert",
        SGLANG,
        "Rust tree",
        "(c) rust cold match+alloc_extend(naive torch)+row write+insert+lock 32k page{block}",
    ),
    PeerLine("insert", SGLANG, "Rust tree, insert alone", "(c) rust insert only 32k page{block}", counts=False),
    PeerLine("insert", VLLM, "", "(c) cold admit+hash(sha256)+alloc+publish 32k bs{block}"),
    PeerLine("insert", VLLM, "hashes ready", "(c) same, hashes ready (no hashing) bs{block}"),
    *(
        line
        for batch in (64, 256)
        for line in (
            PeerLine(
                f"decode-{batch}",
                SGLANG,
                "publishes nothing",
                f"(d) alloc_decode(naive torch CPU)+row write+append B{batch} page{{block}} (no publish on decode)",
            ),
            PeerLine(
                f"decode-{batch}",
                VLLM,
                "",
                f"(d) decode step B{batch} bs{{block}} sha256 (alloc_slots+append+hash/publish)",
            ),
        )
    ),
    PeerLine("evict", SGLANG, "Rust tree", "(e) rust evict-pressure 4k req page{block} 100k pages (4k-tok leaves)"),
    PeerLine("evict", VLLM, "", "(e) evict-pressure 4k req incl hash sha256 bs{block} 100k blocks"),
    PeerLine("evict", VLLM, "hashes ready", "(e) same, hashes ready bs{block}"),
    PeerLine("leaves", SGLANG, "Rust tree", "(e) rust evict 64 one-page leaves of 100k page{block}"),
    PeerLine("bytes", VLLM, "", "(f) sha256"),
    PeerLine("bytes", SGLANG, "Rust tree, tokens and all", "(f) rust page{block} per page"),
)
