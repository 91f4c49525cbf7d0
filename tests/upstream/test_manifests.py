"""The manifests in deploy/ against the schemas of the CustomResourceDefinitions that KubeRay and Volcano publish."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.upstream.manifests import problems, schema_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DEFINITIONS = {
    "kuberay_rayjob": ("kuberay", "helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml", "v1"),
    "volcano_job": ("volcano", "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml", "v1alpha1"),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_manifest_is_what_its_definition_takes(name, upstream):
    checkout, path, version = DEFINITIONS[name]
    text = _read(upstream / checkout, path)
    schema = schema_of(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), version)
    manifest = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    assert list(problems(manifest, schema)) == []
    # The control: a key that is not known, and a value of another kind.
    manifest["spec"]["backofLimit"], manifest["spec"]["ttlSecondsAfterFinished"] = 3, "soon"
    said = "\n".join(problems(manifest, schema))
    assert "'backofLimit' was unexpected" in said and "spec.ttlSecondsAfterFinished: 'soon' is not of type" in said


def _read(checkout: Path, path: str) -> str:
    """A file of a checkout, or of one without a work tree."""
    if (checkout / path).is_file():
        return (checkout / path).read_text()
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
