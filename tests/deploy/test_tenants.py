"""Queues and quotas of two tenants: each job names an existing queue that fits it, and no die is given twice."""

import copy
import itertools
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_deploy import DEPLOY, DIES, NODES, containers, manifest

DIE = "huawei.com/Ascend910"
# Dies of a cluster on which both tenants run the 256-die job at once.
CLUSTER_DIES = 2 * NODES * DIES
TENANTS = ("team-a", "team-b")


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))


def named(kind: str, *files: str) -> dict[str, dict]:
    """Return the objects of a kind by namespace, or by name if they have no namespace."""
    found = [each for name in files for each in documents(name) if each["kind"] == kind]
    return {each["metadata"].get("namespace") or each["metadata"]["name"]: each for each in found}


def kueue_dies(queue: dict) -> dict[str, int]:
    """Return the dies' nominal quota and borrowing limit in a ClusterQueue."""
    ((flavor,),) = [group["flavors"] for group in queue["spec"]["resourceGroups"]]
    (dies,) = [each for each in flavor["resources"] if each["name"] == DIE]
    return dies


def problems(volcano: dict[str, dict], kueue: dict[str, dict], quotas: dict[str, dict]) -> list[str]:
    """Return quotas that exceed the cluster, limits that contradict each other, and jobs that would never start."""
    found = []
    guaranteed = [queue["spec"].get("guarantee", {"resource": {DIE: 0}})["resource"][DIE] for queue in volcano.values()]
    deserved = [queue["spec"]["deserved"][DIE] for queue in volcano.values()]
    nominal = [kueue_dies(queue)["nominalQuota"] for queue in kueue.values()]
    for what, dies in (("guaranteed", guaranteed), ("deserved", deserved), ("nominal", nominal)):
        found += [f"{what}: {sum(dies)}"] if sum(dies) > CLUSTER_DIES else []
    for tenant in TENANTS:
        most = int(quotas[tenant]["spec"]["hard"][f"requests.{DIE}"])
        borrowed = kueue_dies(kueue[tenant])
        reached = {volcano[tenant]["spec"]["capability"][DIE], borrowed["nominalQuota"] + borrowed["borrowingLimit"]}
        found += [f"{tenant}: {most} and {sorted(reached)}"] if reached != {most} else []
        found += [f"{tenant}: no room for the job"] if min(most, *reached) < NODES * DIES else []
    return found


@pytest.fixture
def tenants() -> list[dict[str, dict]]:
    quotas = named("ResourceQuota", "tenants")
    return [named("Queue", "volcano_queues"), named("ClusterQueue", "kueue_queues"), quotas]


def test_tenants_share_the_dies_of_the_cluster(tenants):
    """No die is promised twice, and a namespace can request what its queues give, which is at least one job."""
    assert all(tuple(each) == TENANTS for each in tenants)
    assert problems(*tenants) == []
    assert f"{CLUSTER_DIES // DIES} nodes of {DIES} dies" in (DEPLOY / "tenants.yaml").read_text()


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (0, lambda queue: queue["spec"]["deserved"].update({DIE: 512}), "deserved: 768"),
        (0, lambda queue: queue["spec"]["guarantee"]["resource"].update({DIE: 768}), "guaranteed: 768"),
        (0, lambda queue: queue["spec"]["capability"].update({DIE: 128}), "team-a: no room for the job"),
        (1, lambda queue: kueue_dies(queue).update(nominalQuota=512), "nominal: 768"),
        (1, lambda queue: kueue_dies(queue).update(borrowingLimit=16), "team-a: 256 and [256, 272]"),
        (2, lambda quota: quota["spec"]["hard"].update({f"requests.{DIE}": "128"}), "team-a: no room for the job"),
    ],
)
def test_wrong_die_assignment_detected(tenants, place, change, said):
    changed = copy.deepcopy(tenants)
    change(changed[place]["team-a"])
    assert said in problems(*changed)


def test_one_tenant_borrows_and_the_other_does_not(tenants):
    volcano, kueue, _ = tenants
    for tenant, borrows in zip(TENANTS, (False, True), strict=True):
        specification = volcano[tenant]["spec"]
        assert (specification["capability"][DIE] > specification["deserved"][DIE]) is borrows
        assert (kueue_dies(kueue[tenant])["borrowingLimit"] > 0) is borrows
        assert kueue[tenant]["spec"]["preemption"]["reclaimWithinCohort"] == "Any"
    assert len({queue["spec"]["cohortName"] for queue in kueue.values()}) == 1


def test_jobs_name_queues_of_their_namespace():
    namespaces, local = named("Namespace", "tenants"), named("LocalQueue", "kueue_queues")
    volcano, ray = manifest("volcano_job"), manifest("kuberay_rayjob")
    labels = ray["metadata"]["labels"]
    assert {each["metadata"]["namespace"] for each in (volcano, ray)} <= namespaces.keys()
    assert {volcano["spec"]["queue"], labels["volcano.sh/queue-name"]} <= named("Queue", "volcano_queues").keys()
    queue = local[ray["metadata"]["namespace"]]
    assert queue["metadata"]["name"] == labels["kueue.x-k8s.io/queue-name"]
    cluster_queue = named("ClusterQueue", "kueue_queues")[queue["spec"]["clusterQueue"]]
    selected = cluster_queue["spec"]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert selected == ray["metadata"]["namespace"]
    # Kueue requires this of a RayJob.
    assert ray["spec"]["shutdownAfterJobFinishes"] is True and "clusterSelector" not in ray["spec"]


def test_queue_has_a_quota_for_all_that_a_pod_asks_for():
    """A workload that requests another resource is never admitted; the submitter has KubeRay's default requests."""
    asked = {name for container in containers("kuberay_rayjob") for name in container["resources"]["requests"]}
    for queue in named("ClusterQueue", "kueue_queues").values():
        (group,) = queue["spec"]["resourceGroups"]
        assert asked | {"cpu", "memory"} == set(group["coveredResources"])
        assert [each["name"] for each in group["flavors"][0]["resources"]] == group["coveredResources"]


def test_flavor_is_that_of_the_nodes_of_the_jobs():
    (flavor,) = named("ResourceFlavor", "kueue_queues").values()
    volcano = [task["template"]["spec"] for task in manifest("volcano_job")["spec"]["tasks"]]
    cluster = manifest("kuberay_rayjob")["spec"]["rayClusterSpec"]
    ray = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert all(each["nodeSelector"] == flavor["spec"]["nodeLabels"] for each in itertools.chain(volcano, ray))
    for queue in named("ClusterQueue", "kueue_queues").values():
        (used,) = queue["spec"]["resourceGroups"][0]["flavors"]
        assert used["name"] == flavor["metadata"]["name"]


def test_manifests_are_those_that_the_guide_names():
    guide = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
    for name in ("tenants", "volcano_queues", "kueue_queues"):
        assert f"deploy/{name}.yaml" in guide
