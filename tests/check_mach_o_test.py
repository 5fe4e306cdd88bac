"""tools/check_mach_o.py accepts a program as it should be, and refuses one with any single mistake."""
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent.parent / "tools" / "check_mach_o.py"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"


def command(kind, *fields, name=None):
    body = struct.pack(f"<{len(fields)}I", *fields)
    if name is not None:
        body = struct.pack("<I", 12 + len(body)) + body + name.encode()
    body += b"\0" * (8 - len(body) % 8)
    return struct.pack("<2I", kind, 8 + len(body)) + body


def program(cpu=0x0100000C, system=1, macos=12 << 16, signed=True, needs=(LIBSYSTEM, "@rpath/libheed.0.1.dylib"),
            rpath="@loader_path/../lib", own_name="@rpath/libheed.0.1.dylib"):
    commands = [command(0x32, system, macos, macos, 0), command(0x8000001C, name=rpath),
                command(0xD, 2, 0, 0, name=own_name)]
    commands += [command(0xC, 2, 0, 0, name=name) for name in needs]
    commands += [command(0x1D, 0, 0)] if signed else []
    data = b"".join(commands)
    return struct.pack("<8I", 0xFEEDFACF, cpu, 0, 2, len(commands), len(data), 0, 0) + data


class CheckMachOTest(unittest.TestCase):
    def check(self, *files):
        with tempfile.TemporaryDirectory() as folder:
            for i, data in enumerate(files):
                pathlib.Path(folder, f"file{i}").write_bytes(data)
            os.mkdir(f"{folder}/CMakeFiles")
            pathlib.Path(folder, "CMakeFiles", "tried").write_bytes(program(signed=False))
            return subprocess.run([sys.executable, TOOL, folder, "12.0"], capture_output=True, text=True)

    def test_programs_as_they_should_be_pass(self):
        result = self.check(program(), b"some text", program())
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stdout, "2 programs for macOS 12.0 on 64-bit ARM; libraries that they need: "
                         f"{LIBSYSTEM} @rpath/libheed.0.1.dylib\n")

    def test_each_mistake_is_found(self):
        for arguments, expected in (({"cpu": 0x01000007}, "has code for CPU 0x1000007"),
                                    ({"system": 2}, "is for [(2, '12.0')]"),
                                    ({"macos": 13 << 16 | 3 << 8}, "is for [(1, '13.3')]"),
                                    ({"signed": False}, "is not signed"),
                                    ({"needs": ["/usr/lib/x.dylib"]}, "needs the library /usr/lib/x.dylib"),
                                    ({"rpath": "/home/x/build"}, "looks for libraries in /home/x/build"),
                                    ({"own_name": "/home/x/libheed.dylib"}, "is to be found as /home/x/libheed.dylib")):
            with self.subTest(arguments=arguments):
                result = self.check(program(), program(**arguments))
                self.assertEqual(result.returncode, 1)
                self.assertIn(f"file1: {expected}", result.stdout)

    def test_an_empty_folder_is_a_mistake(self):
        self.assertEqual(self.check(b"some text").returncode, 1)


if __name__ == "__main__":
    unittest.main()
