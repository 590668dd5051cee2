/* Lets one system call fail on one file, or threads from some number on: LD_PRELOAD it. A superuser may read every
 * file, so permissions cannot show these failures.
 *
 *   FAIL_CALL    stat, open, opendir, flock, fsync (of a folder) or ftruncate (FAIL_AFTER: from which time on)
 *   FAIL_NAME    how the path ends; nothing for any path
 *   FAIL_ERRNO   the error's number
 *   FAIL_THREADS how many threads may still be started
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int fails(const char *call, const char *path) {
    const char *failing = getenv("FAIL_CALL"), *name = getenv("FAIL_NAME");
    if (!failing || !name || strcmp(failing, call) != 0) return 0;
    size_t length = strlen(path), ending = strlen(name);
    if (length < ending || strcmp(path + length - ending, name) != 0) return 0;
    errno = atoi(getenv("FAIL_ERRNO"));
    return 1;
}

static int descriptor_fails(const char *call, int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define STAT(name, type) \
    int name(const char *path, struct type *found) { \
        REAL(name); \
        return fails("stat", path) ? -1 : real(path, found); \
    }
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)

#define FSTATAT(name, type) \
    int name(int folder, const char *path, struct type *found, int flags) { \
        REAL(name); \
        return fails("stat", path) ? -1 : real(folder, path, found, flags); \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        return fails("open", path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails("opendir", path) ? NULL : real(path);
}

#define FTRUNCATE(name, type) \
    int name(int descriptor, type size) { \
        REAL(name); \
        static int count; /* the first one empties the lock for a new owner, the second is the last */ \
        if (descriptor_fails("ftruncate", descriptor) && ++count > atoi(getenv("FAIL_AFTER"))) return -1; \
        return real(descriptor, size); \
    }
int flock(int descriptor, int operation) {
    REAL(flock);
    return descriptor_fails("flock", descriptor) ? -1 : real(descriptor, operation);
}

int fsync(int descriptor) { /* of a folder */
    REAL(fsync);
    struct stat found;
    int is_folder = fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode);
    return is_folder && descriptor_fails("fsync", descriptor) ? -1 : real(descriptor);
}

FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

int pthread_create(pthread_t *thread, const pthread_attr_t *options, void *(*start)(void *), void *argument) {
    REAL(pthread_create);
    static int count;
    const char *most = getenv("FAIL_THREADS");
    if (most && ++count > atoi(most)) return EAGAIN;
    return real(thread, options, start, argument);
}
