"""Barriers: the block's named ones, and mbarriers, which count threads and bytes. An mbarrier is 8 bytes at a shared address."""

from numba_impl.cuda.ptx.emit import instruction


@instruction("bar.sync $0, $1;", "rr")
def sync(barrier, count):
    """bar.sync: arrive at a named barrier of the block (0 is syncthreads) and wait for ``count`` threads, whole warps."""


@instruction("bar.arrive $0, $1;", "rr")
def arrive(barrier, count):
    """bar.arrive: arrive at a named barrier without waiting."""


@instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "rr")
def mbarrier_init(barrier, count):
    """mbarrier.init (sm_80): a phase ends when ``count`` arrivals came and all expected bytes."""


@instruction("fence.mbarrier_init.release.cluster;")
def mbarrier_init_fence():
    """fence.mbarrier_init (sm_90): initialised barriers are seen by the bulk copy engine."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
def mbarrier_arrive(barrier):
    """mbarrier.arrive (sm_80): this thread's accesses so far are done."""


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "rr")
def mbarrier_arrive_expect(barrier, size):
    """mbarrier.arrive.expect_tx (sm_90): arrive, and let the phase wait for ``size`` bytes besides."""


_WAIT = """{
.reg .pred p;
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
@!p bra AGAIN;
}"""


@instruction(_WAIT, "rr")
def mbarrier_wait(barrier, parity):
    """mbarrier.try_wait.parity (sm_90): until the phase of that parity has ended."""
