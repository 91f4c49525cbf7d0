import pytest

from verl_plugin.batch_invariance.cache import make_cache


@pytest.mark.parametrize("given", [True, False])
def test_model_infos_shared_and_graphs_own(monkeypatch, tmp_path, given):
    users = tmp_path / "users" if given else tmp_path / "home" / ".cache" / "vllm"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(users) if given else "")
    first, second = (make_cache(tmp_path / name) for name in ("first", "second"))
    (first / "modelinfos" / "model.json").write_text("{}")
    (first / "graph").mkdir()
    assert (second / "modelinfos" / "model.json").exists() and (users / "modelinfos" / "model.json").exists()
    assert not (second / "graph").exists() and not (users / "graph").exists()
