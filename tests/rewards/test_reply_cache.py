import json
import multiprocessing
from pathlib import Path

import pytest

from grpo.rewards.reply_cache import ReplyCache


def write_many(folder: Path, name: str) -> list[str]:
    cache = ReplyCache(folder)
    return [cache.keep(str(i), f"{name} says {i}", {}) for i in range(50)]


def test_a_reply_is_kept_for_later_readers(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "made")
    assert cache.get("a") is None
    assert cache.keep("a", "one\n\u2028two \ud800", {"model": "m"}) == "one\n\u2028two \ud800"
    assert ReplyCache(tmp_path / "made").get("a") == "one\n\u2028two \ud800"
    assert cache.get("b") is None
    assert [json.loads(line)["model"] for line in cache.path.read_text().splitlines()] == ["m"]


def test_the_first_reply_counts_for_all(tmp_path: Path) -> None:
    one, other = ReplyCache(tmp_path), ReplyCache(tmp_path)
    assert other.get("a") is None
    assert one.keep("a", "first", {}) == "first"
    assert other.keep("a", "second", {}) == "first"
    assert other.get("a") == one.get("a") == "first"
    assert len(one.path.read_text().splitlines()) == 1


def test_a_torn_line_costs_its_reply_and_no_other(tmp_path: Path) -> None:
    ReplyCache(tmp_path).keep("a", "first", {})
    path = tmp_path / "replies.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "b", "repl')
    cache = ReplyCache(tmp_path)
    assert (cache.get("a"), cache.get("b")) == ("first", None)
    cache.keep("c", "third", {})
    fresh = ReplyCache(tmp_path)
    assert [fresh.get(key) for key in "abc"] == ["first", None, "third"]
    assert fresh.keep("b", "second", {}) == "second"


@pytest.mark.parametrize("torn", [b'{"key": "b", "reply": "x}', b'{"key": "b"}', b"[1]", b'"}'])
def test_a_torn_line_may_end_like_a_whole_one(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "replies.jsonl").write_bytes(torn + b"\n")
    cache = ReplyCache(tmp_path)
    assert cache.get("b") is None
    assert cache.keep("b", "second", {}) == ReplyCache(tmp_path).get("b") == "second"


def test_processes_share_one_file(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.starmap(write_many, [(tmp_path, "one"), (tmp_path, "other")])
    assert one == other
    assert len((tmp_path / "replies.jsonl").read_text().splitlines()) == 50
