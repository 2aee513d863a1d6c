/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_file.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench_error.h"

/* Renaming onto /dev/stdout would replace the device. */
static bool is_special(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

bool output_open(OutputFile *file, const char *path) {
    *file = (OutputFile){.path = path};
    if (strlen(path) > 4096)
        return bench_refuse("a path of %zu characters is too long to write to", strlen(path));
    if (!is_special(path))
        snprintf(file->temporary, sizeof(file->temporary), "%s.%ld.tmp", path, (long)getpid());
    file->stream = fopen(file->temporary[0] ? file->temporary : path, "w");
    if (!file->stream) return bench_refuse("cannot write %s: %s", path, strerror(errno));
    return true;
}

bool output_commit(OutputFile *file) {
    errno = 0;
    bool ok = !ferror(file->stream);
    ok = fclose(file->stream) == 0 && ok;
    if (ok && file->temporary[0]) ok = rename(file->temporary, file->path) == 0;
    if (ok) return true;
    int error = errno;
    if (file->temporary[0]) unlink(file->temporary);
    return bench_fail("cannot write %s: %s", file->path,
                      error ? strerror(error) : "not everything could be written");
}

void output_discard(OutputFile *file) {
    fclose(file->stream);
    if (file->temporary[0]) unlink(file->temporary);
}

bool output_probe(const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    output_discard(&file);
    return true;
}
