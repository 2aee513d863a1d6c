/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_KEPT_H
#define EP_RUNTIME_KEPT_H

/** Keep memory to the end of the process, since a message that was given up may still use it. A
 *  list tells leak checkers that this is meant. NULL is allowed. */
void ep_keep_memory(void *memory);

#endif
