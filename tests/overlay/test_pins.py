"""A file that names upstreams."""

import pytest

from overlay.pins import Generator, Pins, PinsError, Upstream


def test_every_key_of_a_pins_file_has_its_place(tmp_path):
    file = tmp_path / "pins.toml"
    file.write_text(
        'accept_drift = ["acme.core:f"]\nmiddleware = ["acme_loop:STEPS"]\n'
        'generated = [{ module = "acme_tools.table", file = "../table.md" }, { module = "acme_tools.own" }]\n'
        '[acme]\npackages = ["acme", "acme_extra"]\nroom = "acme_patches"\nfolder = "src"\n'
        'cluster = { repository = "https://host/acme", commit = "1234567890abcdef", reference = "v1" }\n'
        'release = { distribution = "acme-core", version = "1.0" }\n'
        '[other]\npackages = ["other.deep"]\ncluster = { version = "2.0" }\n'
    )
    acme = Upstream(
        name="acme",
        packages=("acme", "acme_extra"),
        room="acme_patches",
        repository="https://host/acme",
        commit="1234567890abcdef",
        reference="v1",
        distribution="acme-core",
        release="1.0",
        folder="src",
    )
    other = Upstream("other", ("other.deep",), version="2.0")
    pins = Pins.read(file)
    generated = (Generator("acme_tools.table", "../table.md"), Generator("acme_tools.own"))
    assert pins == Pins((acme, other), ("acme.core:f",), generated, ("acme_loop:STEPS",))
    assert pins.rooms() == ["acme_patches"] and pins.patched_packages() == ("acme", "acme_extra", "acme_patches")
    assert pins.of_module("acme_extra.x") == acme and pins.of_module("other.deep") == other
    assert pins.of_module("other") is None and pins.of_module("acmes") is None


@pytest.mark.parametrize(
    ("upstream", "label", "supported"),
    [
        (Upstream("a", ("a",), commit="1234567890", reference="v1", version="3"), "v1", "cluster pin v1"),
        (Upstream("a", ("a",), commit="1234567890", version="3"), "12345678", "cluster pin 12345678"),
        (Upstream("a", ("a",), version="3"), "3", "cluster pin 3"),
        (Upstream("a", ("a",), distribution="d", release="2"), "", "release d 2"),
        (Upstream("a", ("a",), version="3", distribution="d", release="2"), "3", "cluster pin 3, release d 2"),
    ],
)
def test_copies_are_named_by_reference_commit_version_and_rewindow(upstream, label, supported):
    assert (upstream.cluster_label, upstream.supported()) == (label, supported)


def test_what_is_installed_is_named_by_its_distribution():
    def installed(distribution: str) -> str:
        return Upstream("a", ("a",), distribution=distribution).installed()

    assert installed("pytest") == f"pytest {pytest.__version__}" and installed("") == "version unknown"
    assert installed("no-such-thing").startswith("no-such-thing without version")


def test_an_unknown_key_a_missing_package_list_or_no_file_is_an_error(tmp_path):
    file = tmp_path / "pins.toml"
    with pytest.raises(PinsError, match="there is no file .*pins.toml that names the upstreams"):
        Pins.read(file)
    file.write_text('[acme]\npackages = ["acme"]\ncluster = { tag = "v1" }\n')
    with pytest.raises(TypeError, match="tag"):
        Pins.read(file)
    file.write_text("[acme]\n")
    with pytest.raises(KeyError, match="packages"):
        Pins.read(file)
