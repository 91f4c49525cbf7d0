"""The manifests in deploy/ match the schemas of the definitions that KubeRay, Volcano and Kueue publish."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.upstream.manifests import problems, schema_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DEFINITIONS = {
    "kuberay_rayjob": ("kuberay", "helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml", "v1"),
    "volcano_job": ("volcano", "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml", "v1alpha1"),
}
_KUEUE = "config/components/crd/bases/kueue.x-k8s.io"
# Queues by file and kind, since a file has several kinds.
QUEUES = {
    ("volcano_queues", "Queue"): ("volcano", "config/crd/volcano/bases/scheduling.volcano.sh_queues.yaml", "v1beta1"),
    ("kueue_queues", "ResourceFlavor"): ("kueue", f"{_KUEUE}_resourceflavors.yaml", "v1beta2"),
    ("kueue_queues", "ClusterQueue"): ("kueue", f"{_KUEUE}_clusterqueues.yaml", "v1beta2"),
    ("kueue_queues", "LocalQueue"): ("kueue", f"{_KUEUE}_localqueues.yaml", "v1beta2"),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_manifest_is_what_its_definition_takes(name, upstream):
    schema = _schema(upstream, *DEFINITIONS[name])
    manifest = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    assert list(problems(manifest, schema)) == []
    # The control: an unknown key, and a value of another type.
    manifest["spec"]["backofLimit"], manifest["spec"]["ttlSecondsAfterFinished"] = 3, "soon"
    said = "\n".join(problems(manifest, schema))
    assert "'backofLimit' was unexpected" in said and "spec.ttlSecondsAfterFinished: 'soon' is not of type" in said


@pytest.mark.parametrize(("name", "kind"), QUEUES)
def test_queues_are_what_their_definition_takes(name, kind, upstream):
    schema = _schema(upstream, *QUEUES[name, kind])
    queues = [each for each in yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()) if each["kind"] == kind]
    assert queues and [problem for queue in queues for problem in problems(queue, schema)] == []
    assert all(queue["apiVersion"].partition("/")[2] == QUEUES[name, kind][2] for queue in queues)
    # The control: a field of another release, and a value of another type.
    queues[0]["spec"]["cohort"], queues[0]["metadata"] = "ascend", "team-a"
    said = "\n".join(problems(queues[0], schema))
    assert "'cohort' was unexpected" in said and "metadata: 'team-a' is not of type" in said


def _schema(upstream: Path, checkout: str, path: str, version: str) -> dict[str, Any]:
    text = _read(upstream / checkout, path)
    return schema_of(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), version)


def _read(checkout: Path, path: str) -> str:
    """Return a file of a checkout, which may have no work tree."""
    if (checkout / path).is_file():
        return (checkout / path).read_text()
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
