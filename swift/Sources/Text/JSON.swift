import ShardmillDecode

/// A JSON value, with strings as UTF-8 bytes and objects as lists.
///
/// Foundation's parsers return dictionaries of `String`, in which two keys that are canonically equivalent ("é" as one
/// scalar or as two) are one key: a vocabulary would lose tokens. This parser keeps them apart, and is faster.
enum JSON {
    case null
    case bool(Bool)
    case number(Double)
    case string(ArraySlice<UInt8>)
    case array([JSON])
    case object([(key: ArraySlice<UInt8>, value: JSON)])

    subscript(_ key: String) -> JSON? {
        guard case .object(let entries) = self else { return nil }
        return entries.first { $0.key.elementsEqual(key.utf8) }?.value
    }

    var bytes: ArraySlice<UInt8>? {
        if case .string(let bytes) = self { return bytes }
        return nil
    }

    var text: String? { bytes.map { String(decoding: $0, as: UTF8.self) } }

    var int: Int? {
        if case .number(let number) = self, let int = Int(exactly: number) { return int }
        return nil
    }

    var bool: Bool? {
        if case .bool(let bool) = self { return bool }
        return nil
    }

    var items: [JSON]? {
        if case .array(let items) = self { return items }
        return nil
    }

    var isNull: Bool {
        if case .null = self { return true }
        return false
    }

    /// Parse a text of UTF-8 bytes.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` with the place of the first byte that is wrong.
    static func parse(_ text: [UInt8]) throws -> JSON {
        var parser = Parser(text: text)
        return try text.withUnsafeBufferPointer { bytes in
            let value = try parser.value(bytes, depth: 0)
            parser.skipSpace(bytes)
            if parser.at < bytes.count { throw parser.wrong("it goes on after its end") }
            return value
        }
    }
}

private struct Parser {
    /// Deeper than any tokenizer file; without a limit, brackets alone would use up the stack.
    static let deepest = 100

    let text: [UInt8]
    var at = 0

    init(text: [UInt8]) { self.text = text }

    func wrong(_ reason: String) -> ShardmillError { ShardmillError(.tokenizer, "no JSON at byte \(at): \(reason)") }

    mutating func skipSpace(_ bytes: UnsafeBufferPointer<UInt8>) {
        while at < bytes.count, bytes[at] == 0x20 || (0x09...0x0D).contains(bytes[at]) { at += 1 }
    }

    /// Take a character if it comes next.
    mutating func take(_ character: Character, _ bytes: UnsafeBufferPointer<UInt8>) -> Bool {
        skipSpace(bytes)
        guard at < bytes.count, bytes[at] == character.asciiValue else { return false }
        at += 1
        return true
    }

    mutating func value(_ bytes: UnsafeBufferPointer<UInt8>, depth: Int) throws -> JSON {
        if depth > Self.deepest { throw wrong("it is nested too deeply") }
        skipSpace(bytes)
        guard at < bytes.count else { throw wrong("it ends too early") }
        switch bytes[at] {
        case UInt8(ascii: "{"): return try object(bytes, depth: depth)
        case UInt8(ascii: "["): return try array(bytes, depth: depth)
        case UInt8(ascii: "\""): return .string(try string(bytes))
        case UInt8(ascii: "t"): return try word("true", .bool(true), bytes)
        case UInt8(ascii: "f"): return try word("false", .bool(false), bytes)
        case UInt8(ascii: "n"): return try word("null", .null, bytes)
        default: return try number(bytes)
        }
    }

    private mutating func word(_ word: String, _ value: JSON, _ bytes: UnsafeBufferPointer<UInt8>) throws -> JSON {
        guard bytes.count - at >= word.utf8.count, bytes[at..<at + word.utf8.count].elementsEqual(word.utf8) else {
            throw wrong("a word is unknown")
        }
        at += word.utf8.count
        return value
    }

    private mutating func number(_ bytes: UnsafeBufferPointer<UInt8>) throws -> JSON {
        let start = at
        while at < bytes.count, "+-.eE0123456789".utf8.contains(bytes[at]) { at += 1 }
        guard let number = Double(String(decoding: bytes[start..<at], as: UTF8.self)) else { throw wrong("no number") }
        return .number(number)
    }

    private mutating func array(_ bytes: UnsafeBufferPointer<UInt8>, depth: Int) throws -> JSON {
        at += 1
        var found: [JSON] = []
        if take("]", bytes) { return .array(found) }
        repeat { found.append(try value(bytes, depth: depth + 1)) } while take(",", bytes)
        guard take("]", bytes) else { throw wrong("a list has no end") }
        return .array(found)
    }

    private mutating func object(_ bytes: UnsafeBufferPointer<UInt8>, depth: Int) throws -> JSON {
        at += 1
        var found: [(ArraySlice<UInt8>, JSON)] = []
        if take("}", bytes) { return .object(found) }
        repeat {
            skipSpace(bytes)
            guard at < bytes.count, bytes[at] == UInt8(ascii: "\"") else { throw wrong("a key is no string") }
            let key = try string(bytes)
            guard take(":", bytes) else { throw wrong("a key has no value") }
            found.append((key, try value(bytes, depth: depth + 1)))
        } while take(",", bytes)
        guard take("}", bytes) else { throw wrong("an object has no end") }
        return .object(found)
    }

    private mutating func string(_ bytes: UnsafeBufferPointer<UInt8>) throws -> ArraySlice<UInt8> {
        at += 1
        let start = at
        while at < bytes.count, bytes[at] != UInt8(ascii: "\""), bytes[at] != UInt8(ascii: "\\") { at += 1 }
        guard at < bytes.count else { throw wrong("a string has no end") }
        if bytes[at] == UInt8(ascii: "\"") {
            at += 1
            return text[start..<at - 1]  // without escapes: a view of the file
        }
        var found = Array(bytes[start..<at])
        while at < bytes.count, bytes[at] != UInt8(ascii: "\"") {
            if bytes[at] == UInt8(ascii: "\\") {
                try escape(bytes, into: &found)
            } else {
                found.append(bytes[at])
                at += 1
            }
        }
        guard at < bytes.count else { throw wrong("a string has no end") }
        at += 1
        return found[...]
    }

    private mutating func escape(_ bytes: UnsafeBufferPointer<UInt8>, into found: inout [UInt8]) throws {
        guard at + 1 < bytes.count else { throw wrong("a string has no end") }
        let plain: [UInt8: UInt8] = [
            UInt8(ascii: "n"): 0x0A, UInt8(ascii: "t"): 0x09, UInt8(ascii: "r"): 0x0D, UInt8(ascii: "b"): 0x08,
            UInt8(ascii: "f"): 0x0C, UInt8(ascii: "\""): 0x22, UInt8(ascii: "\\"): 0x5C, UInt8(ascii: "/"): 0x2F,
        ]
        at += 2
        if let byte = plain[bytes[at - 1]] {
            found.append(byte)
            return
        }
        guard bytes[at - 1] == UInt8(ascii: "u") else { throw wrong("an escape is unknown") }
        var unit = try hex(bytes)
        if (0xD800..<0xDC00).contains(unit), at + 1 < bytes.count, bytes[at] == UInt8(ascii: "\\") {
            at += 2
            let low = try hex(bytes)
            guard (0xDC00..<0xE000).contains(low) else { throw wrong("half a surrogate pair") }
            unit = 0x10000 + (unit - 0xD800) << 10 + (low - 0xDC00)
        }
        guard let scalar = Unicode.Scalar(unit) else { throw wrong("half a surrogate pair") }
        found.append(contentsOf: UTF8.encode(scalar)!)
    }

    private mutating func hex(_ bytes: UnsafeBufferPointer<UInt8>) throws -> UInt32 {
        guard at + 4 <= bytes.count, let unit = UInt32(String(decoding: bytes[at..<at + 4], as: UTF8.self), radix: 16) else {
            throw wrong("an escape is no number")
        }
        at += 4
        return unit
    }
}
