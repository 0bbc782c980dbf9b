"""What the vLLM extractor asks of servers, spool and settings before it begins: refused or warned of in one line."""

import pytest

from common.pipeline.errors import UserError
from tests.support.tiny_extractor import LAYERS, extractor, stream


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tells": {"layer_ids": [2, 3, 4, 6]}}, "extracts layers [2, 3, 4, 6], this config needs [1, 2, 3, 6]"),
        (
            {"tells": {"layer_ids": LAYERS, "shared_storage_path": "/tmp/other"}},
            "writes to /tmp/other, extract.spool is",
        ),
        ({"max_model_len": 1024}, "takes 1024 tokens"),
    ],
)
def test_a_server_for_another_config_is_refused(server, spool, change, said):
    server.tells = {"layer_ids": LAYERS, "shared_storage_path": str(spool)}
    with extractor(server, spool=spool) as made:
        assert "does not say" not in made.description
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(UserError) as error, extractor(server, spool=spool):
        pass
    assert said in str(error.value)


def test_a_server_that_tells_nothing_is_probed(server, spool):
    with extractor(server, spool=spool) as made:
        assert "does not say which layers it extracts" in made.description
        made.probe(stream(0, tokens=50))
        assert server.asked == [list(range(16))]
        server.behave = lambda number, ids: "other layers"
        with pytest.raises(UserError, match="the server must extract layers"):
            made.probe(stream(0))
    server.stop()
    with pytest.raises(UserError, match="no server answers at"), extractor(server, spool=spool):
        pass


@pytest.mark.parametrize("page", [b"<html>login</html>", b"", {}, {"data": None}, {"data": []}, {"data": [{}]}, []])
def test_a_page_that_is_no_list_of_models_is_refused(server, spool, page):
    server.models = page
    with (
        pytest.raises(UserError, match=rf"{server.url} \(no list of models but ") as refused,
        extractor(server, spool=spool),
    ):
        pass
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_may_be_host_and_port_alone(server, spool, ending):
    with extractor(server, spool=spool, extract_urls=(server.url.removesuffix("/v1") + ending,)) as made:
        made.probe(stream(0))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("urls", "said"), [((), "extract.extract_urls is empty"), (("localhost:1",), "must start with")]
)
def test_urls_that_are_none_are_refused(spool, urls, said):
    with pytest.raises(UserError, match=said), extractor(spool=spool, extract_urls=urls):
        pass


@pytest.mark.parametrize(
    ("target", "listed", "warned"),
    [
        ("moonshotai/Kimi-K2.5", {"id": "moonshotai/Kimi-K2.5"}, False),
        ("moonshotai/Kimi-K2.5", {"id": "m", "root": "/data/kimi-k2.5/"}, False),
        ("models/kimi-k2.5", {"id": "Kimi-K2.5", "root": "/data/snapshots/0123"}, False),
        ("moonshotai/Kimi-K2.5", {"id": "m", "root": "/hub/models--moonshotai--Kimi-K2.5/snapshots/0123"}, False),
        ("moonshotai/Kimi-K2.5", {"id": "nvidia/Kimi-K2.5-NVFP4"}, True),
        ("moonshotai/Kimi-K2.5", {"id": "m", "root": "/data/snapshots/0123"}, True),
    ],
)
def test_a_server_of_another_model_is_warned_of(server, spool, capsys, target, listed, warned):
    server.model = listed
    with extractor(server, spool=spool, model=target):
        pass
    said = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line and "serves" in line]
    assert len(said) == warned
    assert all(name in said[0] for name in (target, server.url, *listed.values()) if warned)


def test_a_spool_that_is_too_small_is_warned_of(server, small_disk, capsys):
    """Docker's /dev/shm holds 64 MB where nothing is said; here 8 MiB, and 64 bytes a token."""
    limit = 2**17  # tokens, times 64 bytes: all of it
    server.max_model_len = limit + 2
    with extractor(server, spool=small_disk, max_tokens_per_sample=limit, extract_concurrency=1):
        pass
    assert "the spool" not in capsys.readouterr().out
    with extractor(server, spool=small_disk, max_tokens_per_sample=limit + 1, extract_concurrency=1):
        pass
    said = capsys.readouterr().out
    assert all(part in said for part in ("WARNING", str(small_disk), "--spool", "--shm-size 1g", "131,073 tokens"))
