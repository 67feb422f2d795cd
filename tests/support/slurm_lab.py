"""A real SLURM on one machine: a controller and a slurmd on each of several hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.support.hosts import Hosts, Unavailable
from tests.support.patience import patient

CONF = """\
ClusterName=lab
SlurmctldHost=ctl({address})
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort=17817
SlurmdPort=17818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
MinJobAge=86400
MailProg=/bin/true
SlurmdTimeout=20
KillWait=5
UnkillableStepTimeout=30
SlurmdParameters=config_overrides
{nodes}
PartitionName=lab Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=spare Nodes=n3,n4 MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of four hosts, two in each of the partitions lab and spare; a context manager."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def __enter__(self) -> Slurm:
        missing = [
            tool
            for tool in ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")
            if shutil.which(tool) is None
        ]
        if missing:
            raise Unavailable(
                f"SLURM is not installed: no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
            )
        try:
            self._start()
        except (subprocess.SubprocessError, OSError) as error:
            self.__exit__()
            raise Unavailable(
                f"SLURM's daemons do not run here: {error} {getattr(error, 'stderr', '') or ''}".strip()
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for path in (self.folder / "run").glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)

    @property
    def environment(self) -> dict[str, str]:
        """What SLURM's commands and jobs inherit."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SLURM"))}
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def call(self, *command: str) -> str:
        """Run one of SLURM's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return a job's fields."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", number)))

    def wait(self, number: str, states: tuple[str, ...] = ("COMPLETED",), seconds: float = 400) -> dict[str, str]:
        """Wait until a job is in one of the states, and fail when it ends in another."""
        deadline = time.monotonic() + patient(seconds)
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job
            ended = job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
            assert not ended and time.monotonic() < deadline, f"job {number} is {job['JobState']}, not {states}"
            if job["JobState"] == "PENDING" and job["Restarts"] != "0" and job["Reason"] == "BeginTime":
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now+3")  # not after two minutes
            time.sleep(0.2)

    def _start(self) -> None:
        for name in ("state", "log", "run", *(f"spool.{host}" for host in self.hosts.names)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        run, key = self.folder / "run", self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = [
            f"--socket={run}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={run}/munged.pid",
            "--num-threads=2",
            "--force",
        ]
        _daemon("munged", *munge, f"--log-file={self.folder}/log/munged.log", f"--seed-file={run}/munged.seed")
        nodes = [
            f"NodeName={host} NodeAddr={self.hosts.address(host)} CPUs=8 RealMemory=4000 State=UNKNOWN"
            for host in self.hosts.names
        ]
        conf = self.folder / "slurm.conf"
        address = self.hosts.address("ctl")
        conf.write_text(CONF.format(address=address, run=run, folder=self.folder, nodes="\n".join(nodes)))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        _daemon("unshare", "--uts", "bash", "-c", f"hostname ctl; exec slurmctld -i -f {conf}", env=self.environment)
        for host in self.hosts.names:
            self.start_node(host)
        deadline = time.monotonic() + patient(90)
        while self.states() != {"idle"}:
            if time.monotonic() > deadline:
                raise subprocess.SubprocessError(f"nodes are {self.states()} after 90 s")
            time.sleep(0.1)

    def states(self) -> set[str]:
        """Return the states that nodes are in."""
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return set(done.stdout.split())

    def start_node(self, host: str) -> None:
        """Start a host's slurmd."""
        command = ["slurmd", "-f", str(self.folder / "slurm.conf"), "-N", host]
        # slurmd wants a cgroup file system of its own, which a container does not give.
        _daemon(*self.hosts.command(host, command, before="mount -t tmpfs cg /sys/fs/cgroup"), env=self.environment)


def _daemon(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
