"""What the test's Slurm is told: two nodes on this machine's loopback, with all that it writes in one folder."""

from __future__ import annotations

import os
import pwd
import socket
from contextlib import ExitStack
from pathlib import Path

NODES = ("n1", "n2")
CONFIGURATION = """
ClusterName=shardmill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory,CR_LLN
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
JobRequeue=1
MinJobAge=600
KillWait=4
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=work Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL Default=NO State=UP PriorityTier=10 PreemptMode=off
"""
NODE = (  # two nodes of more CPUs than this machine may have: Slurm believes what it is told
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Boards=1 SocketsPerBoard=1"
    " CoresPerSocket=4 ThreadsPerCore=1 RealMemory=12000 State=UNKNOWN"
)


def configuration(folder: Path) -> str:
    """The content of slurm.conf."""
    host, user = socket.gethostname().split(".")[0], _user()
    first, *others = _free_ports(1 + len(NODES))
    nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, others, strict=True)]
    return CONFIGURATION.format(folder=folder, host=host, user=user, port=first, nodes="\n".join(nodes))


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
