/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_INFO_MESH_H
#define TOOLS_INFO_MESH_H

#include <stdbool.h>

/** The options of ep_info about a mesh; NULL where not given. */
typedef struct MeshOptions {
    const char *mesh, *spec, *kind, *shape, *rank;
} MeshOptions;

/** Print the mesh with the groups of a rank and, if there is a spec, what happens to a tensor.
 * False, with a message. */
bool print_mesh(const MeshOptions *o);

#endif
