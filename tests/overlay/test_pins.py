"""A file that names upstreams."""

import importlib.metadata

import pytest

from overlay.pins import Generator, Pins, PinsError, StackError, Upstream

STACKS = """
default_stack = "old"
[stack.old]
accept_drift = ["acme.core:f"]
[stack.old.acme]
packages = ["acme"]
patch_package = "acme_patches"
release = { distribution = "acme", version = "1.0" }
[stack.old.maths]
packages = ["maths"]
cluster = { version = "3.0.post1" }
release = { distribution = "maths", version = "3.0" }
[stack.new.acme]
packages = ["acme"]
patch_package = "acme_plugin"
release = { distribution = "acme", version = "2.0" }
[stack.new.other]
packages = ["other"]
patch_package = "acme_plugin"
[stack.new.maths]
packages = ["maths"]
release = { distribution = "maths", version = "3.0" }
"""


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
        patch_package="acme_patches",
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
    assert pins.patch_packages() == ["acme_patches"] and pins.patched_packages() == (
        "acme",
        "acme_extra",
        "acme_patches",
    )
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
def test_copies_are_named_by_reference_commit_version_and_release(upstream, label, supported):
    assert (upstream.cluster_label, upstream.supported()) == (label, supported)


def test_installed_packages_named_by_distribution():
    def installed(distribution: str) -> str:
        return Upstream("a", ("a",), distribution=distribution).installed()

    assert installed("pytest") == f"pytest {pytest.__version__}" and installed("") == "version unknown"
    assert installed("no-such-thing").startswith("no-such-thing without version")


def test_old_key_of_the_patch_package_is_accepted(tmp_path):
    file = tmp_path / "pins.toml"
    file.write_text('[acme]\npackages = ["acme"]\nroom = "acme_patches"\n')
    with pytest.warns(FutureWarning, match="the key room of acme in the pins is now patch_package. Rename it"):
        assert Pins.read(file).patch_packages() == ["acme_patches"]


def test_an_unknown_key_a_missing_package_list_or_no_file_is_an_error(tmp_path):
    file = tmp_path / "pins.toml"
    with pytest.raises(PinsError, match="no file .*pins.toml that names the upstreams"):
        Pins.read(file)
    file.write_text('[acme]\npackages = ["acme"]\ncluster = { tag = "v1" }\n')
    with pytest.raises(TypeError, match="tag"):
        Pins.read(file)
    file.write_text("[acme]\n")
    with pytest.raises(KeyError, match="packages"):
        Pins.read(file)


@pytest.fixture
def stacks(tmp_path, monkeypatch):
    """Return the pins of one stack in a file with two, with certain versions installed."""
    file = tmp_path / "pins.toml"
    file.write_text(STACKS)

    def read(stack: str = "", **installed: str) -> Pins:
        def version(distribution: str) -> str:
            if distribution not in installed:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return installed[distribution]

        monkeypatch.setattr(importlib.metadata, "version", version)
        return Pins.read(file, stack)

    return read


def test_a_stack_is_read_by_name_and_else_the_default(stacks):
    old, new = stacks(), stacks("new")
    assert old == stacks("old") and (old.stack, new.stack) == ("old", "new")
    assert (old.accept_drift, new.accept_drift) == (("acme.core:f",), ())
    assert old.of_module("acme.x").release == "1.0" and new.of_module("acme.x").release == "2.0"
    assert (old.patch_packages(), new.patch_packages()) == (["acme_patches"], ["acme_plugin"])
    assert new.patched_packages() == ("acme", "acme_plugin", "other")
    assert (old.lock_name, new.lock_name) == ("fingerprints.lock.json", "fingerprints.new.lock.json")


def test_a_stack_that_is_not_there_is_named(stacks, tmp_path):
    with pytest.raises(PinsError, match=r"^--stack=odd is invalid: no such stack. Set it to old or new.$"):
        stacks("odd")
    (tmp_path / "pins.toml").write_text('[acme]\npackages = ["acme"]\n')
    with pytest.raises(PinsError, match=r"^--stack=old is invalid: .*pins.toml has no stacks. Remove the option.$"):
        stacks("old")


@pytest.mark.parametrize(
    ("stack", "installed"),
    [
        ("old", {"acme": "1.0"}),
        ("old", {"acme": "1.0+cpu"}),
        ("new", {"acme": "2.0.post3", "maths": "3.0"}),
        ("old", {}),
        ("old", {"acme": "2.5"}),  # nobody's: the fingerprints tell what differs
        ("old", {"acme": "2.0", "maths": "3.0"}),  # one package alone was updated
        ("new", {"maths": "3.0"}),  # both have it
    ],
)
def test_packages_of_the_stack_and_of_none_are_left_to_the_lock(stacks, stack, installed):
    stacks(stack, **installed).require_environment()


@pytest.mark.parametrize(
    ("stack", "installed", "other"), [("old", "2.0", "new"), ("old", "2.0.post1", "new"), ("new", "1.0+cpu", "old")]
)
def test_packages_of_another_stack_rejected(stacks, stack, installed, other):
    sentence = (
        f"the patches of stack {stack} do not fit the installed packages, which are those of stack"
        f" {other} (acme {installed}). Use an environment of stack {stack}, or start without its patches"
    )
    with pytest.raises(StackError) as raised:
        stacks(stack, acme=installed).require_environment()
    assert str(raised.value) == sentence
