/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_MPI_H
#define EP_EP_MPI_H

/**
 * Bootstrap over MPI. Link with libep_mpi (pkg-config ep-mpi); libep itself needs no MPI.
 */

/* Leave out MPI's C++ bindings, which would need another library. */
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
 * Make a bootstrap with the ranks of `comm`. Collective over `comm`. libep duplicates `comm` and
 * never sends on the caller's communicator. Ranks of a node use POSIX shared memory; messages
 * between nodes use MPI_Isend and MPI_Irecv. MPI must be initialized, with MPI_THREAD_SERIALIZED or
 * more if calls come from different threads. Destroy the bootstrap before MPI_Finalize. *out must be
 * initialized (EP_BOOTSTRAP_INIT; else EP_ERR_STRUCT_SIZE) and is written only on success.
 */
EpStatus ep_bootstrap_mpi(MPI_Comm comm, EpBootstrap *out);

#ifdef __cplusplus
}
#endif

#endif
