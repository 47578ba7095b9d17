import ShardmillDecode

/// A token's bytes as a key. `String` would compare canonically equivalent texts as equal.
struct Bytes: Hashable {
    let bytes: ArraySlice<UInt8>

    init(_ bytes: ArraySlice<UInt8>) { self.bytes = bytes }
    init(_ text: String) { bytes = ArraySlice(text.utf8) }

    static func == (a: Bytes, b: Bytes) -> Bool { a.bytes.elementsEqual(b.bytes) }

    func hash(into hasher: inout Hasher) {
        bytes.withUnsafeBytes { hasher.combine(bytes: $0) }
    }
}

/// Byte-pair encoding: of bytes that are written as letters (GPT-2's alphabet), or of characters with a fallback to bytes.
struct BPE {
    private let ids: [Bytes: Int]
    private let merges: [UInt64: (rank: Int, id: Int)]
    private let byteIds: [Int]  // ids of <0x00> to <0xFF>, empty without the fallback
    private let unknown: Int?
    private let fusesUnknown: Bool
    private let ignoresMerges: Bool

    /// Read a tokenizer file's model.
    ///
    /// - Throws: `ShardmillError` that names the field which this version does not support.
    init(_ model: JSON, vocabulary: [Bytes: Int]) throws {
        for key in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
            if let value = model[key], !value.isNull, value.bytes?.isEmpty != true {
                throw ShardmillError(.tokenizer, "the BPE model has \(key), which is not supported")
            }
        }
        ids = vocabulary
        var found: [UInt64: (rank: Int, id: Int)] = [:]
        let items = model["merges"]?.items ?? []
        found.reserveCapacity(items.count)
        for (rank, item) in items.enumerated() {
            guard let (left, right) = Self.pair(item) else { throw ShardmillError(.tokenizer, "merge \(rank) is no pair") }
            guard let a = vocabulary[Bytes(left)], let b = vocabulary[Bytes(right)],
                let id = vocabulary[Bytes(left + right)]
            else { throw ShardmillError(.tokenizer, "merge \(rank) names a token that the vocabulary lacks") }
            found[Self.key(a, b)] = (rank, id)
        }
        merges = found
        let fallback = model["byte_fallback"]?.bool ?? false
        byteIds = try !fallback ? [] : (0..<256).map { byte in
            let hex = String(byte, radix: 16, uppercase: true)
            guard let id = vocabulary[Bytes("<0x\(hex.count < 2 ? "0" : "")\(hex)>")] else {
                throw ShardmillError(.tokenizer, "the vocabulary lacks the token of byte \(byte)")
            }
            return id
        }
        if let name = model["unk_token"], !name.isNull {
            guard let bytes = name.bytes, let id = vocabulary[Bytes(bytes)] else {
                throw ShardmillError(.tokenizer, "the vocabulary lacks unk_token")
            }
            unknown = id
        } else {
            unknown = nil
        }
        fusesUnknown = model["fuse_unk"]?.bool ?? false
        ignoresMerges = model["ignore_merges"]?.bool ?? false
    }

    private static func pair(_ item: JSON) -> (ArraySlice<UInt8>, ArraySlice<UInt8>)? {
        if let both = item.items, both.count == 2, let left = both[0].bytes, let right = both[1].bytes { return (left, right) }
        guard let text = item.bytes, let space = text.firstIndex(of: 0x20) else { return nil }
        return (text[..<space], text[(space + 1)...])
    }

    private static func key(_ a: Int, _ b: Int) -> UInt64 { UInt64(UInt32(truncatingIfNeeded: a)) << 32 | UInt64(UInt32(truncatingIfNeeded: b)) }

    /// Return the tokens of a word, given as UTF-8.
    func encode(_ word: ArraySlice<UInt8>) -> [Int] {
        if ignoresMerges, let id = ids[Bytes(word)] { return [id] }
        return merged(symbols(word))
    }

    /// Return one token for each character, or for each byte of a character that the vocabulary lacks.
    private func symbols(_ word: ArraySlice<UInt8>) -> [Int] {
        var found: [Int] = []
        found.reserveCapacity(word.count)
        var lastUnknown = false
        var at = word.startIndex
        while at < word.endIndex {
            let end = min(at + utf8Length(word[at]), word.endIndex)
            if let id = ids[Bytes(word[at..<end])] {
                found.append(id)
                lastUnknown = false
            } else if !byteIds.isEmpty {
                found += word[at..<end].map { byteIds[Int($0)] }
                lastUnknown = false
            } else if let unknown {
                if !(lastUnknown && fusesUnknown) { found.append(unknown) }
                lastUnknown = true
            }
            at = end
        }
        return found
    }

    /// Merge neighbours, the pair of the lowest rank first, and of equals the leftmost.
    private func merged(_ symbols: [Int]) -> [Int] {
        if symbols.count < 2 { return symbols }
        var symbols = symbols
        var next = Array(1...symbols.count)
        var previous = Array(-1..<symbols.count - 1)
        var queue = Heap()
        func offer(_ left: Int, _ queue: inout Heap) {
            let right = next[left]
            if right < symbols.count, let merge = merges[Self.key(symbols[left], symbols[right])] {
                queue.push(Heap.Entry(rank: merge.rank, place: left, id: merge.id, left: symbols[left], right: symbols[right]))
            }
        }
        for place in 0..<symbols.count - 1 { offer(place, &queue) }
        while let entry = queue.pop() {
            let right = next[entry.place]
            // Skip an entry whose symbols were merged otherwise in the meantime.
            guard symbols[entry.place] == entry.left, right < symbols.count, symbols[right] == entry.right else { continue }
            symbols[entry.place] = entry.id
            symbols[right] = -1
            next[entry.place] = next[right]
            if next[right] < symbols.count { previous[next[right]] = entry.place }
            offer(entry.place, &queue)
            if previous[entry.place] >= 0 { offer(previous[entry.place], &queue) }
        }
        return symbols.filter { $0 >= 0 }
    }
}

/// Return how many bytes a character has, by its first byte.
func utf8Length(_ byte: UInt8) -> Int { byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4 }

/// A heap of possible merges, the one of the lowest rank and then of the leftmost place on top.
private struct Heap {
    struct Entry {
        let rank: Int
        let place: Int
        let id: Int
        let left: Int
        let right: Int

        func precedes(_ other: Entry) -> Bool { rank != other.rank ? rank < other.rank : place < other.place }
    }

    private var entries: [Entry] = []

    mutating func push(_ entry: Entry) {
        entries.append(entry)
        var child = entries.count - 1
        while child > 0, entries[child].precedes(entries[(child - 1) / 2]) {
            entries.swapAt(child, (child - 1) / 2)
            child = (child - 1) / 2
        }
    }

    mutating func pop() -> Entry? {
        guard let top = entries.first else { return nil }
        let last = entries.removeLast()
        if entries.isEmpty { return top }
        entries[0] = last
        var parent = 0
        while true {
            var least = parent
            for child in [2 * parent + 1, 2 * parent + 2] where child < entries.count && entries[child].precedes(entries[least]) {
                least = child
            }
            if least == parent { return top }
            entries.swapAt(parent, least)
            parent = least
        }
    }
}
