/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_MPI_H
#define EP_EP_MPI_H

/**
 * Bootstrap over MPI. Link with libep_mpi (pkg-config ep-mpi); libep itself needs no MPI.
 */

/* Without MPI's own C++ bindings, which would need a library of their own. */
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include "ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * A bootstrap whose ranks are those of `comm`. Collective over `comm`, which is duplicated: libep
 * never sends on the caller's communicator. Ranks of a node share POSIX shared memory, messages
 * between nodes go by MPI_Isend and MPI_Irecv. MPI must be initialized, with
 * MPI_THREAD_SERIALIZED or more if calls come from different threads. Destroy before MPI_Finalize.
 */
EpStatus ep_bootstrap_mpi(MPI_Comm comm, EpBootstrap *out);

#ifdef __cplusplus
}
#endif

#endif
