// A plugin of qemu-user 7.2: counts executed instructions, and writes their number to a file (out=FILE).
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

struct qemu_plugin_tb;
typedef void (*translated)(uint64_t id, struct qemu_plugin_tb* block);
typedef void (*ended)(uint64_t id, void* data);
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, translated callback);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int add, void* to, uint64_t number);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
extern void qemu_plugin_register_atexit_cb(uint64_t id, ended callback, void* data);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t executed;

static void count(uint64_t id, struct qemu_plugin_tb* block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block));
}

static void write_total(uint64_t id, void* path) {
    (void)id;
    FILE* file = fopen(path, "w");
    fprintf(file, "%" PRIu64 "\n", executed);
    fclose(file);
}

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
    (void)info;
    if (argc != 1) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, count);
    qemu_plugin_register_atexit_cb(id, write_total, argv[0] + sizeof "out=" - 1);
    return 0;
}
