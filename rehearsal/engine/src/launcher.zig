//! The program that is installed under each name: it hands itself (the zip at its end) and its arguments to python3,
//! in the same process, so that signals and exit codes are the engine's own.
const std = @import("std");

pub fn main(init: std.process.Init) !u8 {
    const a = init.arena.allocator();
    const self = try std.process.executablePathAlloc(init.io, a);
    const args = try init.minimal.args.toSlice(a);
    const argv = try a.alloc([]const u8, args.len + 2);
    argv[0] = "python3";
    argv[1] = "-I"; // neither the user's packages nor PYTHON* variables reach the engine
    argv[2] = self;
    for (args[1..], argv[3..]) |from, *to| to.* = from;
    const err = std.process.replace(init.io, .{ .argv = argv });
    std.debug.print("error: python3 does not start: {t}\n", .{err});
    return 127;
}
