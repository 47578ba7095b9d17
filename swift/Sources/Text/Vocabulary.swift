import ShardmillDecode

/// The tokens of a tokenizer: ids by bytes, and bytes by id. `String` would take canonically equivalent tokens for
/// equal.
struct Vocabulary: Sendable {
    private var bytes: [UInt8]
    private var places: [JSON.Text] = []
    private var ids: [Int32] = []
    private var table: [Int32] = []  // indices of `ids` by hash, -1 where there is none
    private var byId: [Int32] = []  // indices of `ids` by id

    /// Make a vocabulary of the tokens of a file.
    init(_ tokens: [JSON.Token], _ blob: JSON.Blob) {
        bytes = []
        places.reserveCapacity(tokens.count)
        ids.reserveCapacity(tokens.count)
        resize(tokens.count)
        byId = [Int32](repeating: -1, count: 1 + Int(tokens.map(\.id).max() ?? -1))
        for token in tokens {
            let start = bytes.count
            bytes += blob.bytes[token.text.range]
            insert(JSON.Text(start: UInt32(start), count: token.text.count), token.id)
        }
    }

    var count: Int { ids.count }

    /// Add a token that the model does not list.
    mutating func add(_ token: ArraySlice<UInt8>, id: Int) {
        let start = bytes.count
        bytes += token
        if 2 * (ids.count + 1) > table.count { resize(2 * ids.count + 8) }
        while byId.count <= id { byId.append(-1) }
        insert(JSON.Text(start: UInt32(start), count: UInt32(token.count)), Int32(id))
    }

    private mutating func resize(_ count: Int) {
        var size = 16
        while size < 2 * count { size *= 2 }
        table = [Int32](repeating: -1, count: size)
        for index in ids.indices { table[slot(of: places[index])] = Int32(index) }
    }

    private mutating func insert(_ text: JSON.Text, _ id: Int32) {
        let place = slot(of: text)
        if table[place] >= 0 {
            ids[Int(table[place])] = id
        } else {
            table[place] = Int32(ids.count)
            places.append(text)
            ids.append(id)
        }
        if byId[Int(id)] < 0 { byId[Int(id)] = table[place] }
    }

    private func slot(of text: JSON.Text) -> Int {
        bytes.withUnsafeBufferPointer { slot(of: UnsafeBufferPointer(rebasing: $0[text.range])) }
    }

    /// Return the token's slot in the table, or the empty one where it would be.
    private func slot(of token: UnsafeBufferPointer<UInt8>) -> Int {
        var slot = Int(truncatingIfNeeded: hash(token)) & (table.count - 1)
        while table[slot] >= 0, !equals(token, places[Int(table[slot])]) { slot = (slot + 1) & (table.count - 1) }
        return slot
    }

    private func equals(_ token: UnsafeBufferPointer<UInt8>, _ text: JSON.Text) -> Bool {
        if token.count != Int(text.count) { return false }
        return bytes.withUnsafeBufferPointer { bytes in
            for place in 0..<token.count where bytes[Int(text.start) + place] != token[place] { return false }
            return true
        }
    }

    /// Return the id of a token; nil if there is none.
    func id(_ token: UnsafeBufferPointer<UInt8>) -> Int? {
        let index = table[slot(of: token)]
        return index < 0 ? nil : Int(ids[Int(index)])
    }

    func id(_ token: some Sequence<UInt8>) -> Int? { Array(token).withUnsafeBufferPointer { id($0) } }

    /// Return the bytes of a token; nil if no token has that id.
    func token(_ id: Int) -> ArraySlice<UInt8>? {
        guard byId.indices.contains(id), byId[id] >= 0 else { return nil }
        return bytes[places[Int(byId[id])].range]
    }
}

/// Return a hash of bytes. Its seed differs from process to process, so that no file can be made to collide.
func hash(_ bytes: UnsafeBufferPointer<UInt8>) -> UInt64 {
    func fold(_ a: UInt64, _ b: UInt64) -> UInt64 {
        let product = a.multipliedFullWidth(by: b)
        return product.high ^ product.low
    }
    var found = seeds.0 ^ UInt64(bytes.count)
    var at = 0
    let raw = UnsafeRawBufferPointer(bytes)
    while at + 8 <= bytes.count {
        found = fold(found ^ raw.loadUnaligned(fromByteOffset: at, as: UInt64.self), seeds.1)
        at += 8
    }
    var rest: UInt64 = 0
    while at < bytes.count {
        rest = rest << 8 | UInt64(bytes[at])
        at += 1
    }
    return fold(found ^ rest, seeds.1 ^ 0x9E37_79B9_7F4A_7C15)
}

private let seeds = (UInt64.random(in: 1...UInt64.max), UInt64.random(in: 1...UInt64.max) | 1)

/// The ranks of merges by their pairs of tokens.
struct MergeTable: Sendable {
    static let none = UInt32.max

    private var keys: [UInt64]
    private var ranks: [UInt32]

    init(capacity: Int) {
        var size = 16
        while size < 2 * capacity { size *= 2 }
        keys = [UInt64](repeating: UInt64.max, count: size)
        ranks = [UInt32](repeating: Self.none, count: size)
    }

    private func slot(_ key: UInt64) -> Int {
        var slot = Int(truncatingIfNeeded: ((key ^ seeds.0) &* seeds.1) >> 20) & (keys.count - 1)
        while keys[slot] != key, keys[slot] != UInt64.max { slot = (slot + 1) & (keys.count - 1) }
        return slot
    }

    private static func key(_ left: Int32, _ right: Int32) -> UInt64 {
        UInt64(UInt32(bitPattern: left)) << 32 | UInt64(UInt32(bitPattern: right))
    }

    mutating func insert(_ left: Int32, _ right: Int32, rank: UInt32) {
        let key = Self.key(left, right)
        let slot = slot(key)
        keys[slot] = key
        ranks[slot] = rank
    }

    /// Return the rank of a pair's merge, or `none`.
    func rank(_ left: Int32, _ right: Int32) -> UInt32 { ranks[slot(Self.key(left, right))] }
}

/// Words with their tokens, as they were found before.
final class WordCache {
    private struct Slot {
        var hash: UInt64 = 0
        var key: UInt32 = 0
        var value: UInt32 = 0
        var keyCount: UInt16 = 0  // 0 where there is none
        var valueCount: UInt16 = 0
    }

    /// Words that are remembered, and the longest of them in bytes.
    private static let (most, longest) = (20_000, 64)
    private var slots = [Slot](repeating: Slot(), count: 1 << 16)
    private var keys: [UInt8] = []
    private var values: [Int] = []
    private var count = 0

    /// Append a word's tokens, which are asked for only if they are not known yet.
    func append(_ word: UnsafeBufferPointer<UInt8>, to found: inout [Int], encode: (inout [Int]) -> Void) {
        if word.count > Self.longest || word.isEmpty { return encode(&found) }
        let code = hash(word)
        var place = Int(truncatingIfNeeded: code) & (slots.count - 1)
        while slots[place].keyCount > 0 {
            let slot = slots[place]
            if slot.hash == code, Int(slot.keyCount) == word.count, equals(word, Int(slot.key)) {
                if slot.valueCount == 1 {
                    found.append(values[Int(slot.value)])
                } else {
                    found += values[Int(slot.value)..<Int(slot.value) + Int(slot.valueCount)]
                }
                return
            }
            place = (place + 1) & (slots.count - 1)
        }
        let before = found.count
        encode(&found)
        if count >= Self.most {
            for place in slots.indices { slots[place].keyCount = 0 }
            keys.removeAll(keepingCapacity: true)
            values.removeAll(keepingCapacity: true)
            count = 0
            place = Int(truncatingIfNeeded: code) & (slots.count - 1)
        }
        slots[place] = Slot(
            hash: code, key: UInt32(keys.count), value: UInt32(values.count), keyCount: UInt16(word.count),
            valueCount: UInt16(found.count - before))
        keys += word
        values += found[before...]
        count += 1
    }

    private func equals(_ word: UnsafeBufferPointer<UInt8>, _ start: Int) -> Bool {
        keys.withUnsafeBufferPointer { keys in
            for place in 0..<word.count where keys[start + place] != word[place] { return false }
            return true
        }
    }
}
