import ShardmillDecode

/// A JSON value, with strings as UTF-8 bytes and objects as lists.
///
/// Foundation's parsers return dictionaries of `String`, in which two keys that are canonically equivalent ("é" as one
/// scalar or as two) are one key: a vocabulary would lose tokens. This parser keeps them apart. A vocabulary and its
/// merges have a form of their own, without an object for each entry: they are nearly all of a file.
struct JSON {
    /// The file's bytes. Strings with escapes have been decoded in place, so that every string is a range of them.
    final class Blob: Sendable {
        let bytes: [UInt8]
        init(_ bytes: [UInt8]) { self.bytes = bytes }
    }

    /// A string's place in the blob.
    struct Text {
        let start, count: UInt32
        var range: Range<Int> { Int(start)..<Int(start) + Int(count) }
    }

    /// A token of a vocabulary; the id is -1 if it is no number below 2 ** 24.
    struct Token {
        let text: Text
        let id: Int32
    }

    enum Node {
        case null
        case bool(Bool)
        case number(Double)
        case string(Text)
        case array([Node])
        case object([(key: Text, value: Node)])
        case vocabulary([Token])
        /// Pairs of strings; a string with one space is a pair, too.
        case merges([(left: Text, right: Text)])
    }

    let blob: Blob
    let node: Node

    subscript(_ key: String) -> JSON? {
        guard case .object(let entries) = node else { return nil }
        let found = entries.last { blob.bytes[$0.key.range].elementsEqual(key.utf8) }
        return found.map { JSON(blob: blob, node: $0.value) }
    }

    var bytes: ArraySlice<UInt8>? {
        if case .string(let text) = node { return blob.bytes[text.range] }
        return nil
    }

    var text: String? { bytes.map { String(decoding: $0, as: UTF8.self) } }

    var int: Int? {
        if case .number(let number) = node, let int = Int(exactly: number) { return int }
        return nil
    }

    var bool: Bool? {
        if case .bool(let bool) = node { return bool }
        return nil
    }

    var items: [JSON]? {
        if case .array(let items) = node { return items.map { JSON(blob: blob, node: $0) } }
        return nil
    }

    var isNull: Bool {
        if case .null = node { return true }
        return false
    }

    /// Parse a text of UTF-8 bytes.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` with the place of the first byte that is wrong.
    static func parse(_ text: [UInt8]) throws -> JSON {
        if text.count > 1 << 30 { throw ShardmillError(.tokenizer, "it is larger than 1 GB") }
        var text = text
        let node = try text.withUnsafeMutableBufferPointer { bytes in
            var parser = Parser(bytes: bytes)
            return try parser.whole()
        }
        return JSON(blob: Blob(text), node: node)
    }
}

extension JSON {
    /// The type of a normalizer, a pre-tokenizer and so on.
    var type: String { self["type"]?.text ?? "" }

    /// Return what a key has; nil if it is null or absent.
    ///
    /// - Throws: `ShardmillError` that names the key, if it is of another type.
    private func optional<Value>(_ key: String, _ kind: String, _ read: (JSON) -> Value?) throws -> Value? {
        guard let found = self[key], !found.isNull else { return nil }
        guard let value = read(found) else { throw ShardmillError(.tokenizer, "\(key) of '\(type)' is no \(kind)") }
        return value
    }

    private func need<Value>(_ key: String, _ found: Value?) throws -> Value {
        guard let found else { throw ShardmillError(.tokenizer, "'\(type)' has no \(key)") }
        return found
    }

    func flag(_ key: String) throws -> Bool? { try optional(key, "boolean") { $0.bool } }
    func bytes(_ key: String) throws -> ArraySlice<UInt8> { try need(key, optionalBytes(key)) }
    func optionalBytes(_ key: String) throws -> ArraySlice<UInt8>? { try optional(key, "string") { $0.bytes } }
    func items(_ key: String) throws -> [JSON] { try need(key, optional(key, "list") { $0.items }) }

    /// Return a whole number that is not negative.
    func count(_ key: String) throws -> Int? {
        try optional(key, "whole number") { $0.int.flatMap { $0 < 0 ? nil : $0 } }
    }
}

private struct Parser {
    /// Deeper than any tokenizer file; without a limit, brackets alone would use up the stack.
    static let deepest = 100
    /// More values than any tokenizer file has beside its vocabulary and merges.
    static let most = 4_000_000

    let bytes: UnsafeMutableBufferPointer<UInt8>
    var at = 0
    var values = 0

    init(bytes: UnsafeMutableBufferPointer<UInt8>) { self.bytes = bytes }

    func wrong(_ reason: String) -> ShardmillError { ShardmillError(.tokenizer, "no JSON at byte \(at): \(reason)") }

    mutating func whole() throws -> JSON.Node {
        if let place = firstInvalid(UnsafeBufferPointer(bytes)) {
            throw ShardmillError(.tokenizer, "no JSON at byte \(place): it is no UTF-8")
        }
        let value = try value(depth: 0, path: "")
        skipSpace()
        if at < bytes.count { throw wrong("it goes on after its end") }
        return value
    }

    mutating func skipSpace() {
        while at < bytes.count, bytes[at] == 0x20 || (0x09...0x0D).contains(bytes[at]) { at += 1 }
    }

    /// Take a character if it comes next.
    mutating func take(_ character: Unicode.Scalar) -> Bool {
        skipSpace()
        guard at < bytes.count, bytes[at] == UInt8(ascii: character) else { return false }
        at += 1
        return true
    }

    /// Return the next value; `path` is "" for the file's, "model" for the model and so on, as far as it matters.
    mutating func value(depth: Int, path: String) throws -> JSON.Node {
        if depth > Self.deepest { throw wrong("it is nested too deeply") }
        values += 1
        if values > Self.most { throw wrong("it has too many values") }
        skipSpace()
        guard at < bytes.count else { throw wrong("it ends too early") }
        switch bytes[at] {
        case UInt8(ascii: "{"): return path == "model/vocab" ? .vocabulary(try vocabulary()) : try object(depth, path)
        case UInt8(ascii: "["): return path == "model/merges" ? .merges(try merges()) : try array(depth)
        case UInt8(ascii: "\""): return .string(try string())
        case UInt8(ascii: "t"): return try word("true", .bool(true))
        case UInt8(ascii: "f"): return try word("false", .bool(false))
        case UInt8(ascii: "n"): return try word("null", .null)
        default: return .number(try number())
        }
    }

    private mutating func word(_ word: StaticString, _ value: JSON.Node) throws -> JSON.Node {
        let count = word.utf8CodeUnitCount
        guard bytes.count - at >= count, (0..<count).allSatisfy({ bytes[at + $0] == word.utf8Start[$0] }) else {
            throw wrong("a word is unknown")
        }
        at += count
        return value
    }

    private mutating func number() throws -> Double {
        let start = at
        while at < bytes.count, "+-.eE0123456789".utf8.contains(bytes[at]) { at += 1 }
        // Swift reads more than JSON has: +1, 01 and .5.
        let whole = bytes[start..<at].drop { $0 == UInt8(ascii: "-") }.prefix { (0x30...0x39).contains($0) }
        let signs = whole.startIndex - start
        guard at - start < 400, signs < 2, !whole.isEmpty, whole.count == 1 || whole.first != 0x30,
            let number = Double(String(decoding: bytes[start..<at], as: UTF8.self))
        else { throw wrong("no number") }
        return number
    }

    private mutating func array(_ depth: Int) throws -> JSON.Node {
        at += 1
        var found: [JSON.Node] = []
        if take("]") { return .array(found) }
        repeat { found.append(try value(depth: depth + 1, path: "-")) } while take(",")
        guard take("]") else { throw wrong("a list has no end") }
        return .array(found)
    }

    private mutating func key() throws -> JSON.Text {
        skipSpace()
        guard at < bytes.count, bytes[at] == UInt8(ascii: "\"") else { throw wrong("a key is no string") }
        let found = try string()
        guard take(":") else { throw wrong("a key has no value") }
        return found
    }

    private mutating func object(_ depth: Int, _ path: String) throws -> JSON.Node {
        at += 1
        var found: [(JSON.Text, JSON.Node)] = []
        if take("}") { return .object(found) }
        repeat {
            let key = try key()
            let name = depth < 2 ? String(decoding: bytes[key.range], as: UTF8.self) : ""
            found.append(
                (key, try value(depth: depth + 1, path: depth == 0 ? name : depth == 1 ? "\(path)/\(name)" : "-")))
        } while take(",")
        guard take("}") else { throw wrong("an object has no end") }
        return .object(found)
    }

    /// Return an object whose values are ids.
    private mutating func vocabulary() throws -> [JSON.Token] {
        at += 1
        var found: [JSON.Token] = []
        if take("}") { return found }
        repeat {
            let key = try key()
            skipSpace()
            let start = at
            var id = 0
            while at < bytes.count, at - start < 9, (0x30...0x39).contains(bytes[at]) {
                id = 10 * id + Int(bytes[at] - 0x30)
                at += 1
            }
            if start == at || id >= 1 << 24 || (at < bytes.count && ".eE0123456789".utf8.contains(bytes[at])) {
                let name = String(decoding: bytes[key.range], as: UTF8.self).prefix(40)
                throw ShardmillError(.tokenizer, "the token '\(name)' has no id")
            }
            found.append(JSON.Token(text: key, id: Int32(id)))
        } while take(",")
        guard take("}") else { throw wrong("an object has no end") }
        return found
    }

    private mutating func merges() throws -> [(left: JSON.Text, right: JSON.Text)] {
        at += 1
        var found: [(left: JSON.Text, right: JSON.Text)] = []
        if take("]") { return found }
        func wrong() -> ShardmillError { ShardmillError(.tokenizer, "merge \(found.count) is no pair") }
        repeat {
            if take("[") {
                skipSpace()
                guard at < bytes.count, bytes[at] == UInt8(ascii: "\"") else { throw wrong() }
                let left = try string()
                guard take(","),
                    {
                        skipSpace()
                        return at < bytes.count && bytes[at] == UInt8(ascii: "\"")
                    }()
                else { throw wrong() }
                found.append((left, try string()))
                guard take("]") else { throw wrong() }
            } else {
                guard at < bytes.count, bytes[at] == UInt8(ascii: "\"") else { throw wrong() }
                let both = try string()
                guard let space = both.range.first(where: { bytes[$0] == 0x20 }) else { throw wrong() }
                let count = UInt32(space) - both.start
                found.append(
                    (
                        JSON.Text(start: both.start, count: count),
                        JSON.Text(start: UInt32(space + 1), count: both.count - count - 1)
                    ))
            }
        } while take(",")
        guard take("]") else { throw self.wrong("a list has no end") }
        return found
    }

    private mutating func string() throws -> JSON.Text {
        at += 1
        let start = at
        while at < bytes.count, bytes[at] != UInt8(ascii: "\""), bytes[at] != UInt8(ascii: "\\") { at += 1 }
        var end = at  // what is decoded takes no more room than its escapes
        while at < bytes.count, bytes[at] != UInt8(ascii: "\"") {
            if bytes[at] == UInt8(ascii: "\\") {
                try escape(&end)
            } else {
                bytes[end] = bytes[at]
                end += 1
                at += 1
            }
        }
        guard at < bytes.count else { throw wrong("a string has no end") }
        at += 1
        return JSON.Text(start: UInt32(start), count: UInt32(end - start))
    }

    private mutating func escape(_ end: inout Int) throws {
        guard at + 1 < bytes.count else { throw wrong("a string has no end") }
        at += 2
        let plain: UInt8? =
            switch bytes[at - 1] {
            case UInt8(ascii: "n"): 0x0A
            case UInt8(ascii: "t"): 0x09
            case UInt8(ascii: "r"): 0x0D
            case UInt8(ascii: "b"): 0x08
            case UInt8(ascii: "f"): 0x0C
            case UInt8(ascii: "\""), UInt8(ascii: "\\"), UInt8(ascii: "/"): bytes[at - 1]
            default: nil
            }
        if let plain {
            bytes[end] = plain
            end += 1
            return
        }
        guard bytes[at - 1] == UInt8(ascii: "u") else { throw wrong("an escape is unknown") }
        var unit = try hex()
        if (0xD800..<0xDC00).contains(unit), at + 1 < bytes.count, bytes[at] == UInt8(ascii: "\\") {
            guard bytes[at + 1] == UInt8(ascii: "u") else { throw wrong("half a surrogate pair") }
            at += 2
            let low = try hex()
            guard (0xDC00..<0xE000).contains(low) else { throw wrong("half a surrogate pair") }
            unit = 0x10000 + (unit - 0xD800) << 10 + (low - 0xDC00)
        }
        guard let scalar = Unicode.Scalar(unit) else { throw wrong("half a surrogate pair") }
        for byte in UTF8.encode(scalar) ?? .init() {
            bytes[end] = byte
            end += 1
        }
    }

    private mutating func hex() throws -> UInt32 {
        guard at + 4 <= bytes.count, bytes[at..<at + 4].allSatisfy({ Unicode.Scalar($0).properties.isASCIIHexDigit }),
            let unit = UInt32(String(decoding: bytes[at..<at + 4], as: UTF8.self), radix: 16)
        else { throw wrong("an escape is no number") }
        at += 4
        return unit
    }
}

/// Return the place of the first byte that belongs to no character of UTF-8.
private func firstInvalid(_ bytes: UnsafeBufferPointer<UInt8>) -> Int? {
    var at = 0
    while at < bytes.count {
        let first = bytes[at]
        if first < 0x80 {
            at += 1
            continue
        }
        let count = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0
        guard count > 0, at + count <= bytes.count else { return at }
        let second = bytes[at + 1]
        let least: UInt8 = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80
        let greatest: UInt8 = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF
        guard second >= least, second <= greatest, (2..<max(2, count)).allSatisfy({ bytes[at + $0] & 0xC0 == 0x80 })
        else { return at }
        at += count
    }
    return nil
}
