"""An isolated local Ray: it listens on loopback only, lives in a private folder, and is gone at the end.

By default `ray.init` opens every server of Ray on all interfaces, among them an agent that runs shell commands for
whoever connects, and makes its folder writable for all users. Torch's stores listen on all interfaces too, whatever
their address. A killed worker leaves its sockets and its shared memory behind.
"""

from verl_patches.trainer.isolated_ray.confinement import confine_worker, name_shared_memory
from verl_patches.trainer.isolated_ray.folder import FolderError, private_folder
from verl_patches.trainer.isolated_ray.interpreter import is_found_by_raylets, python_of_workers
from verl_patches.trainer.isolated_ray.job_servers import without_job_servers
from verl_patches.trainer.isolated_ray.machine import ON_LOOPBACK, IsolatedRay, isolated_ray

__all__ = [
    "ON_LOOPBACK",
    "FolderError",
    "IsolatedRay",
    "confine_worker",
    "is_found_by_raylets",
    "name_shared_memory",
    "isolated_ray",
    "private_folder",
    "python_of_workers",
    "without_job_servers",
]
