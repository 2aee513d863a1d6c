/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_BIND_H
#define EP_BOOTSTRAP_BIND_H

/**
 * Binding a rank to CPUs near its GPU (setting EP_BIND).
 */

#include <stddef.h>

/** Where Linux lists the CPUs near a PCI device; the bus id in lower case. */
void ep_bind_list_path(const char *bus, char *path, size_t path_bytes);

/**
 * Bind the process, or the calling thread alone, to those CPUs of the list in file `path`, as in
 * "0-27,56-83", that it may use; where it is bound to some of them already, to these. 1 if that was
 * done. `said` tells what was done, or why nothing.
 */
int ep_bind_to_list(const char *path, int whole_process, char *said, size_t said_bytes);

#endif
