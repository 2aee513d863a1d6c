/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_DLFCN_H
#define EMULATOR_DLFCN_H

/** dlopen finds the emulator's libnccl.so.2, libcuda.so.1 and libcublas.so.13; other libraries are the
 *  system's. */

#include_next <dlfcn.h>

#ifdef __cplusplus
extern "C" {
#endif

void *emulated_dlopen(const char *name, int flags);
void *emulated_dlsym(void *library, const char *name);

#ifdef __cplusplus
}
#endif

#ifndef EMULATOR_REAL_DLFCN
#define dlopen(name, flags) emulated_dlopen(name, flags)
#define dlsym(library, name) emulated_dlsym(library, name)
#endif

#endif
