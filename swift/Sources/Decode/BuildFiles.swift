import Foundation

/// A file of a build, as model.json names it.
package struct BuildFile: Equatable, Sendable {
    /// Its path in the build's folder.
    package let path: String
    /// Its sha256, in hexadecimal digits.
    package let sha256: String
}

/// The files of a build.
package struct BuildFiles: Sendable {
    /// The model's name.
    package let model: String
    /// Every file that a device needs, but model.json.
    package let files: [BuildFile]
    /// The bytes of these files, as far as model.json says them: builds that are older than this key have none.
    package let bytes: Int

    /// Read what model.json says.
    ///
    /// - Parameters:
    ///   - content: model.json.
    ///   - compiled: whether compiled programs are wanted whose packages are there. A device compiles the packages, if
    ///     not the very version of its system compiled the programs.
    /// - Throws: `ShardmillError` of kind `build` if it is damaged, or leads out of the build.
    package init(_ content: Data, compiled: Bool) throws {
        func damaged(_ why: String) -> ShardmillError { ShardmillError(.build, "model.json: \(why)") }
        guard let read = try? JSONSerialization.jsonObject(with: content) as? [String: Any],
            let model = read["model"] as? String, let parts = read["parts"] as? [[String: Any]]
        else { throw damaged("it is damaged, or no model.json") }
        let packages = read["packages"] as? [String: [String: Any]] ?? [:]
        var entries = ["embedding", "tokenizer", "texts", "expected"].compactMap { read[$0] as? [String: Any] }
        entries += read["dense"] as? [[String: Any]] ?? []
        for part in parts {
            let package = (part["name"] as? String).flatMap { packages[$0] }
            if let package { entries.append(package) }
            if compiled || package == nil, let program = part["program"] as? [String: Any] { entries.append(program) }
        }
        var (found, total) = ([String: BuildFile](), 0)
        for entry in entries {
            guard let path = entry["path"] as? String else { throw damaged("an entry has no path") }
            var named = entry["files"] as? [String: String] ?? [:]
            named = Dictionary(uniqueKeysWithValues: named.map { ("\(path)/\($0)", $1) })
            if let sum = entry["sha256"] as? String { named[path] = sum }
            if named.isEmpty { throw damaged("\(path.prefix(100)) has no sha256") }
            for (path, sum) in named {
                _ = try Manifest.inside(URL(fileURLWithPath: "/"), path)
                found[path] = BuildFile(path: path, sha256: sum)
            }
            total += max(0, entry["bytes"] as? Int ?? 0)
        }
        (self.model, bytes) = (model, total)
        files = found.values.sorted { $0.path < $1.path }
    }
}

/// The sha256 of bytes that come piece by piece.
package struct SHA256: Sendable {
    private static let rounds: [UInt32] = primes(64).map { fraction(cbrt(Double($0))) }
    private var state: [UInt32] = primes(8).map { fraction(Double($0).squareRoot()) }
    private var pending: [UInt8] = []
    private var count = 0

    /// Begin.
    package init() {}

    /// Take the next bytes.
    package mutating func update(_ bytes: Data) {
        count += bytes.count
        pending += bytes
        let whole = pending.count / 64 * 64
        pending.withUnsafeBufferPointer { all in
            for start in stride(from: 0, to: whole, by: 64) {
                Self.fold(UnsafeBufferPointer(rebasing: all[start..<start + 64]), into: &state)
            }
        }
        pending.removeFirst(whole)
    }

    /// Return the sum in hexadecimal digits.
    package func hexadecimal() -> String {
        var last = self
        let padding = [0x80] + [UInt8](repeating: 0, count: (119 - count % 64) % 64)
        let length = withUnsafeBytes(of: UInt64(count * 8).bigEndian) { [UInt8]($0) }
        last.update(Data(padding + length))
        return last.state.map { word in
            let digits = String(word, radix: 16)
            return String(repeating: "0", count: 8 - digits.count) + digits
        }.joined()
    }

    private static func fold(_ block: UnsafeBufferPointer<UInt8>, into state: inout [UInt32]) {
        func turned(_ x: UInt32, _ by: UInt32) -> UInt32 { x >> by | x << (32 - by) }
        withUnsafeTemporaryAllocation(of: UInt32.self, capacity: 64) { words in
            for i in 0..<16 { words[i] = (0..<4).reduce(0) { $0 << 8 | UInt32(block[4 * i + $1]) } }
            for i in 16..<64 {
                let (x, y) = (words[i - 15], words[i - 2])
                let (s, t) = (turned(x, 7) ^ turned(x, 18) ^ x >> 3, turned(y, 17) ^ turned(y, 19) ^ y >> 10)
                words[i] = words[i - 16] &+ s &+ words[i - 7] &+ t
            }
            var (a, b, c, d) = (state[0], state[1], state[2], state[3])
            var (e, f, g, h) = (state[4], state[5], state[6], state[7])
            for i in 0..<64 {
                let mixed = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)
                let one = h &+ mixed &+ (e & f ^ ~e & g) &+ rounds[i] &+ words[i]
                let other = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) &+ (a & b ^ a & c ^ b & c)
                (h, g, f, e, d, c, b, a) = (g, f, e, d &+ one, c, b, a, one &+ other)
            }
            for (i, word) in [a, b, c, d, e, f, g, h].enumerated() { state[i] = state[i] &+ word }
        }
    }

    private static func primes(_ count: Int) -> [Int] {
        var found: [Int] = []
        var next = 2
        while found.count < count {
            if found.allSatisfy({ next % $0 != 0 }) { found.append(next) }
            next += 1
        }
        return found
    }

    /// Return the first 32 bits of a number's fraction.
    private static func fraction(_ number: Double) -> UInt32 {
        UInt32((number - number.rounded(.down)) * 4_294_967_296)
    }
}

/// Return the sha256 of a file, and its size; nil if there is none.
///
/// - Parameters:
///   - file: where it lies.
///   - check: called between pieces of the file, with how many bytes were read; it may throw to stop.
package func sum(of file: URL, check: (Int) throws -> Void = { _ in }) throws -> (sha256: String, bytes: Int)? {
    guard let handle = try? FileHandle(forReadingFrom: file) else { return nil }
    defer { try? handle.close() }
    var (sum, total) = (SHA256(), 0)
    while let piece = try handle.read(upToCount: 1 << 20), !piece.isEmpty {
        sum.update(piece)
        total += piece.count
        try check(piece.count)
    }
    return (sum.hexadecimal(), total)
}
