/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_bootstrap_nccl, in builds with and without CUDA. Needs no GPU. */
#include "tests/harness/check.h"

/* As in ep_nccl.h, whose nccl.h a build without CUDA may not have. */
struct ncclComm;
EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out);

static char never_read[64];

SoloTest(bootstrap_nccl, wrong_arguments) {
    struct ncclComm *comm = (struct ncclComm *)(void *)never_read;
    EpBootstrap out = EP_BOOTSTRAP_INIT, before;
    out.struct_size = 8;
    out.rank = 77;
    before = out;
#if EP_WITH_CUDA
    CHECK_REFUSED(ep_bootstrap_nccl(comm, NULL), EP_ERR_NULL, "ep_bootstrap_nccl: out");
    CHECK_REFUSED(ep_bootstrap_nccl(comm, &out), EP_ERR_STRUCT_SIZE, "ep_bootstrap_nccl: out",
                  "got 8");
    before.struct_size = out.struct_size = sizeof(out);
    CHECK_REFUSED(ep_bootstrap_nccl(NULL, &out), EP_ERR_NULL, "ep_bootstrap_nccl: comm",
                  "expected a communicator, got NULL");
#else
    CHECK_REFUSED(ep_bootstrap_nccl(comm, &out), EP_ERR_UNSUPPORTED, "ep_bootstrap_nccl: comm",
                  "expected a build of libep with CUDA, got one without");
    CHECK_REFUSED(ep_bootstrap_nccl(NULL, NULL), EP_ERR_UNSUPPORTED, "ep_bootstrap_nccl: comm");
#endif
    CHECK(memcmp(&out, &before, sizeof(out)) == 0, "out was written");
}
