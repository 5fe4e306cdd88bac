// A plugin of QEMU that counts the instructions of functions whose symbol has a text in it, and the calls of another
// function. Compiled and run by count_instructions.py, with the declarations of version 1 of QEMU's interface, whose
// header Debian does not install.
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
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static char wanted[128], called[128];
static uint64_t count, calls, entry;

static int Has(const struct qemu_plugin_insn* instruction, const char* text) {
  const char* symbol = qemu_plugin_insn_symbol(instruction);
  return symbol != NULL && strstr(symbol, text) != NULL;
}

static void Translated(Id id, struct qemu_plugin_tb* block) {
  (void)id;
  uint64_t matching = 0;
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
    matching += (uint64_t)Has(qemu_plugin_tb_get_insn(block, i), wanted);
  }
  if (matching > 0) qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, matching);
  // The first block of a function that is translated is its entry.
  const struct qemu_plugin_insn* first = qemu_plugin_tb_get_insn(block, 0);
  if (entry == 0 && Has(first, called)) entry = qemu_plugin_insn_vaddr(first);
  if (qemu_plugin_insn_vaddr(first) == entry) qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &calls, 1);
}

static void Ends(Id id, void* unused) {
  (void)id;
  (void)unused;
  fprintf(stderr, "%" PRIu64 " instructions in %" PRIu64 " calls\n", count, calls);
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
  (void)info;
  if (argc != 2 || strncmp(argv[0], "symbol=", 7) != 0 || strncmp(argv[1], "calls=", 6) != 0) return 1;
  snprintf(wanted, sizeof(wanted), "%s", argv[0] + 7);
  snprintf(called, sizeof(called), "%s", argv[1] + 6);
  qemu_plugin_register_vcpu_tb_trans_cb(id, Translated);
  qemu_plugin_register_atexit_cb(id, Ends, NULL);
  return 0;
}
