//! pack OUT PREFIX [NAME FILE]...: writes PREFIX and, behind it, a zip whose members are the named files.
const std = @import("std");
const zip = @import("zip.zig");

pub fn main(init: std.process.Init) !u8 {
    const a = init.arena.allocator();
    const io = init.io;
    const args = try init.minimal.args.toSlice(a);
    if (args.len < 3 or args.len % 2 == 0) {
        std.debug.print("usage: pack OUT PREFIX [NAME FILE]...\n", .{});
        return 2;
    }
    const cwd = std.Io.Dir.cwd();
    var out: std.ArrayList(u8) = .empty;
    try out.appendSlice(a, try cwd.readFileAlloc(io, args[2], a, .limited(64 << 20)));
    const members = try a.alloc(zip.Member, (args.len - 3) / 2);
    for (members, 0..) |*m, i|
        m.* = .{ .name = args[3 + 2 * i], .data = try cwd.readFileAlloc(io, args[4 + 2 * i], a, .limited(64 << 20)) };
    try zip.append(a, &out, members);
    const file = try cwd.createFile(io, args[1], .{ .permissions = .executable_file });
    defer file.close(io);
    try file.writeStreamingAll(io, out.items);
    return 0;
}
