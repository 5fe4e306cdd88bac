// A plugin of QEMU that counts the instructions of functions whose symbol has a text in it. Compiled and run by
// count_instructions.py, with the declarations of version 1 of QEMU's interface, whose header Debian does not install.
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef uint64_t Id;
enum Operation { kAdd };

void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum Operation, void*, uint64_t);
void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void*), void*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
const char* qemu_plugin_insn_symbol(const struct qemu_plugin_insn*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static char wanted[128];
static uint64_t count;

static void Translated(Id id, struct qemu_plugin_tb* block) {
  (void)id;
  uint64_t matching = 0;
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
    const char* symbol = qemu_plugin_insn_symbol(qemu_plugin_tb_get_insn(block, i));
    matching += (uint64_t)(symbol != NULL && strstr(symbol, wanted) != NULL);
  }
  if (matching > 0) qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, matching);
}

static void Ends(Id id, void* unused) {
  (void)id;
  (void)unused;
  fprintf(stderr, "%" PRIu64 " instructions\n", count);
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "symbol=", 7) != 0) return 1;
  snprintf(wanted, sizeof(wanted), "%s", argv[0] + 7);
  qemu_plugin_register_vcpu_tb_trans_cb(id, Translated);
  qemu_plugin_register_atexit_cb(id, Ends, NULL);
  return 0;
}
