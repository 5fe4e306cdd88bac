# The tag of C++ exceptions, which code and libraries refer to, and which Zig's package defines nowhere.
	.globl	__cpp_exception
	.tagtype	__cpp_exception i32
__cpp_exception:
