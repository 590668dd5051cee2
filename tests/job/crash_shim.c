/* Counts the system calls that change files, and at one of them kills or interrupts the process, or fills the disk.

   Loaded with LD_PRELOAD. crash_arm(KILL, N, log) starts counting from 1. The N-th call is not done: the process gets
   SIGKILL instead, except that the N-th write first writes half of its bytes. N = 0 only counts. If `log` is a
   descriptor, each call is written to it as a line. With FILL, writing and allocating fail for lack of room from the N-th
   call on; with INTERRUPT, the process gets SIGINT before the N-th call. fsync is counted but not done: a killed process
   loses nothing that it wrote. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long count;
static long target = -1; /* -1: off */
static int log_to = -1;
static enum { KILL = 0, FILL, INTERRUPT } fault;

enum { DO = 0, TEAR, FULL };

void crash_arm(int what, long n, int log) {
  atomic_store(&count, 0);
  fault = what;
  log_to = log;
  target = n;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static void name_of(int fd, char *name, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, name, size - 1);
  name[length < 0 ? 0 : length] = 0;
}

/* Returns TEAR if the calling write is to be torn, FULL if there is no room for it; does not return if any other call is
   the last. */
static int step(const char *call, int folder, const char *path, int is_write) {
  if (target < 0) return DO;
  long n = atomic_fetch_add(&count, 1) + 1;
  if (log_to >= 0) {
    char base[4096] = "", line[8192];
    if (folder != AT_FDCWD && path[0] != '/') name_of(folder, base, sizeof base);
    int length = snprintf(line, sizeof line, "%s %s%s%s\n", call, base, base[0] && path[0] ? "/" : "", path);
    syscall(SYS_write, log_to, line, (size_t)length);
  }
  if (fault == FILL) return n >= target && (is_write || strcmp(call, "allocate") == 0) ? FULL : DO;
  if (n != target) return DO;
  if (fault == INTERRUPT) {
    kill(getpid(), SIGINT);
    return DO;
  }
  if (!is_write) die();
  return TEAR;
}

static int is_file(int fd) {
  struct stat found;
  return target >= 0 && fd > 2 && fd != log_to && fstat(fd, &found) == 0 &&
         (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode));
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int changes(const char *path, int flags) {
  return ((flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT)) && strncmp(path, "/dev/", 5) != 0;
}

#define OPEN(name)                                           \
  int name(const char *path, int flags, ...) {               \
    va_list rest;                                            \
    va_start(rest, flags);                                   \
    int mode = va_arg(rest, int);                            \
    va_end(rest);                                            \
    if (changes(path, flags)) step("open", AT_FDCWD, path, 0); \
    return NEXT(name)(path, flags, mode);                    \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                       \
  int name(int folder, const char *path, int flags, ...) { \
    va_list rest;                                          \
    va_start(rest, flags);                                 \
    int mode = va_arg(rest, int);                          \
    va_end(rest);                                          \
    if (changes(path, flags)) step("open", folder, path, 0); \
    return NEXT(name)(folder, path, flags, mode);          \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
  switch (is_file(fd) ? step("write", fd, "", 1) : DO) {
    case TEAR:
      syscall(SYS_write, fd, data, size / 2);
      die();
    case FULL:
      errno = ENOSPC;
      return -1;
  }
  return NEXT(write)(fd, data, size);
}

/* Half of a direct write, in whole blocks. */
#define PWRITE(name)                                                       \
  ssize_t name(int fd, const void *data, size_t size, off_t position) {    \
    switch (is_file(fd) ? step("write", fd, "", 1) : DO) {                 \
      case TEAR:                                                           \
        syscall(SYS_pwrite64, fd, data, size / 2 / 4096 * 4096, position); \
        die();                                                             \
      case FULL:                                                           \
        errno = ENOSPC;                                                    \
        return -1;                                                         \
    }                                                                      \
    return NEXT(name)(fd, data, size, position);                           \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

/* posix_fallocate returns the error's number. */
#define ON_FILE(name, call, parameters, arguments)                     \
  int name parameters {                                                \
    if (is_file(fd) && step(call, fd, "", 0) == FULL) return ENOSPC;   \
    return NEXT(name) arguments;                                       \
  }
ON_FILE(ftruncate, "truncate", (int fd, off_t size), (fd, size))
ON_FILE(ftruncate64, "truncate", (int fd, off_t size), (fd, size))
ON_FILE(posix_fallocate, "allocate", (int fd, off_t at, off_t size), (fd, at, size))
ON_FILE(posix_fallocate64, "allocate", (int fd, off_t at, off_t size), (fd, at, size))
ON_FILE(fallocate, "allocate", (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FILE(fallocate64, "allocate", (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FILE(futimens, "utime", (int fd, const struct timespec times[2]), (fd, times))

#define SYNC(name)                            \
  int name(int fd) {                          \
    if (is_file(fd)) {                        \
      step("sync", fd, "", 0);                \
      return 0;                               \
    }                                         \
    return NEXT(name)(fd);                    \
  }
SYNC(fsync)
SYNC(fdatasync)

#define ON_PATH(name, call, folder, path, parameters, arguments) \
  int name parameters {                                          \
    step(call, folder, path, 0);                                 \
    return NEXT(name) arguments;                                 \
  }
ON_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), (path))
ON_PATH(unlinkat, "unlink", folder, path, (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(rmdir, "unlink", AT_FDCWD, path, (const char *path), (path))
ON_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, "mkdir", folder, path, (int folder, const char *path, mode_t mode), (folder, path, mode))
ON_PATH(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), (from, to))
ON_PATH(renameat, "rename", folder, to, (int origin, const char *from, int folder, const char *to),
        (origin, from, folder, to))
ON_PATH(link, "link", AT_FDCWD, to, (const char *from, const char *to), (from, to))
ON_PATH(linkat, "link", folder, to, (int origin, const char *from, int folder, const char *to, int flags),
        (origin, from, folder, to, flags))
ON_PATH(symlink, "link", AT_FDCWD, to, (const char *from, const char *to), (from, to))
