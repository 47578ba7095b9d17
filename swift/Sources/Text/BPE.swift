import ShardmillDecode

/// Byte-pair encoding: of bytes that are written as letters (GPT-2's alphabet), or of characters with a fallback to
/// bytes.
struct BPE: Sendable {
    private let vocabulary: Vocabulary
    private let merges: MergeTable
    private let results: [Int32]  // the token that a merge makes, by rank
    private let letters: [Int32]  // with words of bytes: the token of each byte's letter
    private let ascii: [Int32]  // the token of each ASCII character
    private let byteIds: [Int]  // ids of <0x00> to <0xFF>, empty without the fallback
    private let unknown: Int?
    private let fusesUnknown: Bool
    private let ignoresMerges: Bool
    /// For each byte, whether some merge joins a token that ends in it with one that begins with "▁"; empty if words
    /// are not cut. Words are cut before each other "▁", unless it follows another one, because no merge leads over
    /// this place.
    private let joins: [Bool]

    /// Whether words are given as bytes.
    var isOfBytes: Bool { !letters.isEmpty }

    private static let mark: [UInt8] = [0xE2, 0x96, 0x81]

    /// Read a tokenizer file's model.
    ///
    /// - Parameters:
    ///   - model: the model's entry in the file.
    ///   - vocabulary: all tokens.
    ///   - ofBytes: true if words are given as bytes, whose letters the vocabulary has.
    /// - Throws: `ShardmillError` that names the field which this version does not support.
    init(_ model: JSON, vocabulary: Vocabulary, ofBytes: Bool) throws {
        for key in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
            if let value = model[key], !value.isNull, value.bytes?.isEmpty != true {
                throw ShardmillError(.tokenizer, "the BPE model has \(key), which is not supported")
            }
        }
        self.vocabulary = vocabulary
        guard case .merges(let pairs)? = model["merges"]?.node else {
            throw ShardmillError(.tokenizer, "the BPE model has no merges")
        }
        (merges, results, joins) = try Self.read(pairs, model.blob, vocabulary, ofBytes: ofBytes)
        letters = ofBytes ? ByteAlphabet.utf8.map { Int32(vocabulary.id($0) ?? -1) } : []
        ascii = (0..<128).map { Int32(vocabulary.id(CollectionOfOne(UInt8($0))) ?? -1) }
        let fallsBack = try model.flag("byte_fallback") ?? false
        byteIds = try (0..<(fallsBack ? 256 : 0)).map { (byte: Int) throws -> Int in
            let hex = String(byte, radix: 16, uppercase: true)
            guard let id = vocabulary.id("<0x\(hex.count < 2 ? "0" : "")\(hex)>".utf8) else {
                throw ShardmillError(.tokenizer, "the vocabulary lacks the token of byte \(byte)")
            }
            return id
        }
        unknown = try model.optionalBytes("unk_token").map { (name: ArraySlice<UInt8>) throws -> Int in
            guard let id = vocabulary.id(name) else {
                throw ShardmillError(.tokenizer, "the vocabulary lacks unk_token")
            }
            return id
        }
        fusesUnknown = try model.flag("fuse_unk") ?? false
        ignoresMerges = try model.flag("ignore_merges") ?? false
    }

    private static func read(
        _ pairs: [(left: JSON.Text, right: JSON.Text)], _ blob: JSON.Blob, _ vocabulary: Vocabulary, ofBytes: Bool
    ) throws -> (MergeTable, [Int32], [Bool]) {
        var merges = MergeTable(capacity: pairs.count)
        var results: [Int32] = []
        results.reserveCapacity(pairs.count)
        let cuts = !ofBytes && vocabulary.id(mark) != nil
        var joins = [Bool](repeating: false, count: cuts ? 256 : 0)
        var both: [UInt8] = []
        try blob.bytes.withUnsafeBufferPointer { bytes in
            for (rank, pair) in pairs.enumerated() {
                let left = UnsafeBufferPointer(rebasing: bytes[pair.left.range])
                let right = UnsafeBufferPointer(rebasing: bytes[pair.right.range])
                both.removeAll(keepingCapacity: true)
                both += left
                both += right
                guard let a = vocabulary.id(left), let b = vocabulary.id(right),
                    let id = both.withUnsafeBufferPointer({ vocabulary.id($0) })
                else { throw ShardmillError(.tokenizer, "merge \(rank) names a token that the vocabulary lacks") }
                merges.insert(Int32(a), Int32(b), rank: UInt32(rank))
                results.append(Int32(id))
                if cuts, right.starts(with: mark), let last = left.last, !left.suffix(3).elementsEqual(mark) {
                    joins[Int(last)] = true
                }
            }
        }
        return (merges, results, joins)
    }

    /// Append the tokens of a word, given as UTF-8, or as bytes of any kind if the model is one of bytes.
    func encode(_ word: UnsafeBufferPointer<UInt8>, _ cache: WordCache, into found: inout [Int]) {
        if joins.isEmpty { return cache.append(word, to: &found) { encodeWhole(word, into: &$0) } }
        var start = 0
        var at = 0
        while at < word.count {
            if word[at] == 0xE2, at > start, isMark(word, at), !joins[Int(word[at - 1])],
                !(at >= 3 && isMark(word, at - 3))
            {
                let piece = UnsafeBufferPointer(rebasing: word[start..<at])
                cache.append(piece, to: &found) { encodeWhole(piece, into: &$0) }
                start = at
            }
            at += 1
        }
        let piece = UnsafeBufferPointer(rebasing: word[start...])
        cache.append(piece, to: &found) { encodeWhole(piece, into: &$0) }
    }

    private func isMark(_ word: UnsafeBufferPointer<UInt8>, _ at: Int) -> Bool {
        at + 3 <= word.count && word[at] == 0xE2 && word[at + 1] == 0x96 && word[at + 2] == 0x81
    }

    private func encodeWhole(_ word: UnsafeBufferPointer<UInt8>, into found: inout [Int]) {
        if ignoresMerges, let id = letters.isEmpty ? vocabulary.id(word) : vocabulary.id(ByteAlphabet.letters(word)) {
            return found.append(id)
        }
        let symbols = symbols(word)
        if symbols.count <= 64 { mergeShort(symbols, into: &found) } else { mergeLong(symbols, into: &found) }
    }

    /// Return one token for each character, or for each byte of a character that the vocabulary lacks.
    private func symbols(_ word: UnsafeBufferPointer<UInt8>) -> [Int32] {
        var found: [Int32] = []
        found.reserveCapacity(word.count)
        var lastUnknown = false
        var at = 0
        while at < word.count {
            let length = letters.isEmpty ? min(utf8Length(word[at]), word.count - at) : 1
            let known: Int32
            if !letters.isEmpty {
                known = letters[Int(word[at])]
            } else if length == 1 {
                known = ascii[Int(word[at] & 0x7F)]
            } else {
                known = Int32(vocabulary.id(UnsafeBufferPointer(rebasing: word[at..<at + length])) ?? -1)
            }
            if known >= 0 {
                found.append(known)
                lastUnknown = false
            } else if !byteIds.isEmpty {
                for byte in word[at..<at + length] { found.append(Int32(byteIds[Int(byte)])) }
                lastUnknown = false
            } else if let unknown {
                if !(lastUnknown && fusesUnknown) { found.append(Int32(unknown)) }
                lastUnknown = true
            }
            at += length
        }
        return found
    }

    /// Merge neighbours, the pair of the lowest rank first, and of equals the leftmost: look at all pairs each time.
    private func mergeShort(_ given: [Int32], into found: inout [Int]) {
        var symbols = given
        var count = symbols.count
        var ranks = [UInt32](repeating: MergeTable.none, count: max(1, count))
        if count > 1 { for place in 0..<count - 1 { ranks[place] = merges.rank(symbols[place], symbols[place + 1]) } }
        while count > 1 {
            var place = 0
            var least = MergeTable.none
            for other in 0..<count - 1 where ranks[other] < least { (place, least) = (other, ranks[other]) }
            if least == MergeTable.none { break }
            symbols[place] = results[Int(least)]
            count -= 1
            var other = place + 1
            while other < count {
                symbols[other] = symbols[other + 1]
                ranks[other] = ranks[other + 1]
                other += 1
            }
            ranks[place] = place + 1 < count ? merges.rank(symbols[place], symbols[place + 1]) : MergeTable.none
            if place > 0 { ranks[place - 1] = merges.rank(symbols[place - 1], symbols[place]) }
        }
        for place in 0..<count { found.append(Int(symbols[place])) }
    }

    /// Do as `mergeShort` does, with a heap of pairs.
    private func mergeLong(_ given: [Int32], into found: inout [Int]) {
        var symbols = given
        let count = symbols.count
        var next = Array(1...count)
        var previous = Array(-1..<count - 1)
        var ranks = [UInt32](repeating: MergeTable.none, count: count)  // of the pair that begins at each place
        var queue = Heap()
        for place in 0..<count - 1 {
            ranks[place] = merges.rank(symbols[place], symbols[place + 1])
            if ranks[place] != MergeTable.none { queue.push(UInt64(ranks[place]) << 32 | UInt64(place)) }
        }
        func offer(_ left: Int) {
            let right = next[left]
            ranks[left] = right < count ? merges.rank(symbols[left], symbols[right]) : MergeTable.none
            if ranks[left] != MergeTable.none { queue.push(UInt64(ranks[left]) << 32 | UInt64(left)) }
        }
        while let entry = queue.pop() {
            let place = Int(entry & 0xFFFF_FFFF)
            if ranks[place] != UInt32(entry >> 32) { continue }  // its symbols were merged otherwise in the meantime
            let right = next[place]
            symbols[place] = results[Int(ranks[place])]
            symbols[right] = -1
            ranks[right] = MergeTable.none
            next[place] = next[right]
            if next[right] < count { previous[next[right]] = place }
            offer(place)
            if previous[place] >= 0 { offer(previous[place]) }
        }
        for symbol in symbols where symbol >= 0 { found.append(Int(symbol)) }
    }
}

/// Return how many bytes a character has, by its first byte.
func utf8Length(_ byte: UInt8) -> Int { byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4 }

/// A heap of numbers, the least on top.
private struct Heap {
    private var entries: [UInt64] = []

    mutating func push(_ entry: UInt64) {
        entries.append(entry)
        var child = entries.count - 1
        while child > 0, entries[child] < entries[(child - 1) / 2] {
            entries.swapAt(child, (child - 1) / 2)
            child = (child - 1) / 2
        }
    }

    mutating func pop() -> UInt64? {
        guard let top = entries.first else { return nil }
        let last = entries.removeLast()
        if entries.isEmpty { return top }
        entries[0] = last
        var parent = 0
        while true {
            var least = parent
            let child = 2 * parent + 1
            if child < entries.count, entries[child] < entries[least] { least = child }
            if child + 1 < entries.count, entries[child + 1] < entries[least] { least = child + 1 }
            if least == parent { return top }
            entries.swapAt(parent, least)
            parent = least
        }
    }
}
