/* For LD_PRELOAD: while the file that CHAOS_ERRORS names is there, nothing in a folder `checkpoints` can be opened,
   made or renamed: EIO, as from a network disk that is away. For Python's own calls and for tensorstore's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(const char *path) {
    const char *flag = getenv("CHAOS_ERRORS");
    if (!flag || !path || !strstr(path, "/checkpoints/") || access(flag, F_OK)) return 0;
    errno = EIO;
    return 1;
}

#define WRAP(name, parameters, arguments)                            \
    int name parameters {                                            \
        static int(*real) parameters;                                \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        return fails(path) ? -1 : real arguments;                    \
    }

WRAP(open, (const char *path, int flags, mode_t mode), (path, flags, mode))
WRAP(open64, (const char *path, int flags, mode_t mode), (path, flags, mode))
WRAP(openat, (int at, const char *path, int flags, mode_t mode), (at, path, flags, mode))
WRAP(openat64, (int at, const char *path, int flags, mode_t mode), (at, path, flags, mode))
WRAP(mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(rename, (const char *path, const char *to), (path, to))
