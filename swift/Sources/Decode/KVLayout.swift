import Foundation

/// R, the slots of a convolution's ring.
let convRing = 32
/// What masks add to the scores of hidden slots. Never -inf: the Neural Engine's softmax turns it into NaN.
let masked: Float = -1e4
/// The position of a slot that holds nothing.
let never = Int.max

/// The positions in all slots, and the arrays of a pass that follow from these positions.
///
/// One layout serves all parts of a model, since all parts see the same tokens.
package struct KVLayout {
    /// S, the number of slots of the whole context.
    package let slots: Int
    /// The number of slots that the programs have now.
    package private(set) var length: Int
    let window: Int?
    let windowSlots: Int
    let taps: Int
    let rope: [String: RopeTable]
    let recurrence: Recurrence?
    /// The position that each slot was last written with.
    private(set) var held: [Int]
    /// The positions in the ring of the sliding layers.
    private(set) var recent: [Int]
    /// The positions in the rings of convolutions and recurrences.
    private(set) var ring: [Int]
    /// A recurrence's state holds every position before this one, and no other.
    private var folded = 0
    /// Positions that a recurrence has folded without putting them into its ring.
    private var skipped = 0
    private var tables: [String: (cos: [Float], sin: [Float])] = [:]

    /// Make empty slots for a build, and the rotary tables, with a row for each slot.
    package init(_ manifest: Manifest) {
        self.init(
            slots: manifest.context, window: manifest.window, windowSlots: manifest.windowSlots,
            taps: manifest.convTaps, rope: manifest.rope, recurrence: manifest.recurrence)
    }

    init(
        slots: Int, window: Int?, windowSlots: Int, taps: Int, rope: [String: RopeTable], recurrence: Recurrence? = nil
    ) {
        self.slots = slots
        length = slots
        self.window = window
        self.windowSlots = windowSlots
        self.taps = taps
        self.rope = rope
        self.recurrence = recurrence
        held = [Int](repeating: never, count: slots)
        recent = [Int](repeating: never, count: windowSlots)
        ring = [Int](repeating: never, count: convRing)
        for (name, table) in rope { tables[name] = ropeTable(table, positions: slots) }
    }

    /// Forget every slot. What the states hold is masked until it is overwritten.
    package mutating func reset() {
        held = [Int](repeating: never, count: slots)
        recent = [Int](repeating: never, count: windowSlots)
        ring = [Int](repeating: never, count: convRing)
        (folded, skipped) = (0, 0)
    }

    /// Whether no slot holds anything.
    package var isEmpty: Bool { [held, recent, ring].allSatisfy { $0.allSatisfy { $0 == never } } }

    /// Go on with programs of `length` slots; the content of the other slots is forgotten.
    package mutating func resize(_ length: Int) {
        for slot in length..<max(slots, length) { held[slot] = never }
        self.length = length
    }

    /// Hide slots until they are written again.
    package mutating func forget(_ slots: [Int]) {
        let gone = Set(slots.map { held[$0] })
        for slot in recent.indices where gone.contains(recent[slot]) { recent[slot] = never }
        for slot in slots { held[slot] = never }
    }

    /// Return whether the next pass may start at a position, given what the rings still hold.
    package func rewindable(_ position: Int) -> Bool {
        if taps > 0 {
            for p in max(position - taps + 1, 0)..<max(position, 0) where ring[p % convRing] != p { return false }
        }
        if let recurrence, !isFoldable(position, recurrence) { return false }
        return windowSlots == 0 || overtaken(position) == nil
    }

    /// Return how many tokens may be fed one by one from a position on, so that a pass may still start there; nil if no
    /// recurrence limits this.
    package func undoable(_ position: Int) -> Int? {
        guard let recurrence else { return nil }
        let left = (position == 0 ? 0 : folded) + recurrence.block - position
        return left == 0 ? recurrence.block : left  // a block that is full is folded by the first token
    }

    /// Return the first earlier position that a sliding layer would look at and whose slot a later position took.
    private func overtaken(_ position: Int) -> Int? {
        for wanted in max(position - (window ?? 0) + 1, 0)..<max(position, 0) {
            let there = recent[wanted % windowSlots]
            if there != never && there > wanted { return wanted }
        }
        return nil
    }

    /// Return the arrays of a pass by the names of inputs, and mark its slots as written.
    ///
    /// - Throws: `ShardmillError` if a layer would need a token that its ring no longer holds; then no slot counts as
    ///   written.
    package mutating func arrays(slots where_: [Int], positions: [Int]) throws -> [String: HostArray] {
        if windowSlots > 0, let lost = overtaken(positions[0]) {
            throw ShardmillError(
                .request, "position \(lost) is no longer in the sliding layers' ring of \(windowSlots); feed it again")
        }
        var found = rotary(positions)
        if taps > 0 { try found.merge(ringMasks(positions)) { $1 } }
        if let recurrence { try found.merge(recurrentMasks(positions, recurrence)) { $1 } }
        for (slot, position) in zip(where_, positions) { held[slot] = position }
        found["attn_mask"] = attentionMask(held[..<length], positions)
        found["kv_write_mask"] = writeMask(length, where_)
        if windowSlots > 0 {
            let places = positions.map { $0 % windowSlots }
            for (place, position) in zip(places, positions) { recent[place] = position }
            found["attn_mask_sliding"] = attentionMask(recent[...], positions, window)
            found["kv_write_mask_sliding"] = writeMask(windowSlots, places)
        } else if window != nil {
            found["attn_mask_sliding"] = attentionMask(held[..<length], positions, window)
        }
        return found
    }

    /// Return the arrays of a pass of one token that is written nowhere, and sees the positions before its own.
    ///
    /// - Parameters:
    ///   - position: the token's.
    ///   - tables: whose rotary tables it takes.
    func before(_ position: Int, tables: KVLayout) -> [String: HostArray] {
        var found = tables.rotary([position])
        found["attn_mask"] = attentionMask(held[..<length], [position - 1])
        if let window {
            let there = windowSlots > 0 ? recent[...] : held[..<length]
            found["attn_mask_sliding"] = attentionMask(there, [position - 1], window - 1)
        }
        return found
    }

    /// Return the rotary rows of positions, each [T, rope_dim / 2]. A sliding context goes past the tables.
    private func rotary(_ positions: [Int]) -> [String: HostArray] {
        var found: [String: HostArray] = [:]
        for (name, numbers) in rope {
            let half = numbers.inv_freq.count
            var cos = [Float]()
            var sin = [Float]()
            if positions.last! < slots, let table = tables[name] {
                for p in positions {
                    cos += table.cos[p * half..<(p + 1) * half]
                    sin += table.sin[p * half..<(p + 1) * half]
                }
            } else {
                (cos, sin) = ropeRows(numbers, positions)
            }
            let suffix = name == "rope" ? "" : "_local"
            found["rope_cos\(suffix)"] = HostArray(shape: [positions.count, half], values: cos)
            found["rope_sin\(suffix)"] = HostArray(shape: [positions.count, half], values: sin)
        }
        return found
    }

    /// Return conv_write_mask [1, 1, T, R] and conv_read_mask [1, L - 1, R, T]: slot = position mod R.
    private mutating func ringMasks(_ positions: [Int]) throws -> [String: HostArray] {
        let count = positions.count
        var next = ring
        for p in positions { next[p % convRing] = p }
        var write = HostArray(zeros: [1, 1, count, convRing])
        for (t, p) in positions.enumerated() { write.values[t * convRing + p % convRing] = 1 }
        var read = HostArray(zeros: [1, max(taps - 1, 0), convRing, count])
        for back in 1..<max(taps, 1) {
            for (t, p) in positions.enumerated() where p >= back {  // before the text a convolution reads zeros
                let wanted = p - back
                if next[wanted % convRing] != wanted {
                    throw ShardmillError(
                        .request,
                        "position \(wanted) is no longer in the convolutions' ring of \(convRing); feed it again")
                }
                read.values[((back - 1) * convRing + wanted % convRing) * count + t] = 1
            }
        }
        ring = next
        return ["conv_write_mask": write, "conv_read_mask": read]
    }

    /// Return whether a recurrence can go on at a position.
    ///
    /// Nothing after it may be folded, and what is pending before it must be in the ring, with what the convolution
    /// reads. A text may always begin.
    private func isFoldable(_ position: Int, _ recurrence: Recurrence) -> Bool {
        if position == 0 { return true }
        if !(folded...folded + recurrence.block).contains(position) { return false }
        return (max(folded - recurrence.taps + 1, 0)..<position).allSatisfy { ring[ringSlot($0)] == $0 }
    }

    /// Return the slot of a position in the ring of a recurrence.
    private func ringSlot(_ position: Int) -> Int { ((position - skipped) % convRing + convRing) % convRing }

    /// Return conv_write_mask [1, 1, T, R] and the three masks of a recurrence.
    ///
    /// Pending tokens are folded only when a window has no room for them beside the pass' own tokens. Each fold rounds
    /// the state, and a session can go back as far as the state is not folded. A pass of more than `narrow` tokens
    /// folds all its own blocks but the last. It puts into the ring what the next pass needs, in the slots after the
    /// slots that it reads.
    private mutating func recurrentMasks(_ positions: [Int], _ recurrence: Recurrence) throws -> [String: HostArray] {
        let (first, count, block, back) = (positions[0], positions.count, recurrence.block, recurrence.taps - 1)
        let isWide = recurrence.narrow.map { count > $0 } ?? false
        if count > block && !isWide || positions != Array(first..<first + count) {
            throw ShardmillError(
                .request, "positions \(positions): a recurrence takes up to \(block) that follow one another")
        }
        if !isFoldable(first, recurrence) {
            throw ShardmillError(
                .request, "position \(first): the recurrence is folded up to \(folded); feed the text again")
        }
        let before = first == 0 ? 0 : folded
        let stays = first - before + count <= block && !isWide
        let begin = stays ? before : first  // of the second window
        var read = HostArray(zeros: [1, 2 * (block + back), convRing, count])
        let windows = [(before, stays ? 0 : first), (begin, isWide ? first : first + count)]
        for (window, (start, end)) in windows.enumerated() {
            for p in start - back..<start + block where p >= 0 && p < end {
                let column = window * (block + back) + p - (start - back)
                read.values[(column * convRing + ringSlot(p)) * count] = 1
            }
        }
        let pending = isWide ? first + (count - 1) / block * block : begin  // after the pass
        let left = max(pending - back - first, 0)  // tokens at the beginning that the ring does not get
        skipped += left
        var write = HostArray(zeros: [1, 1, count, convRing])
        var out = HostArray(zeros: [1, 1, count, block])
        for (t, p) in positions.enumerated() {
            out.values[t * block + (p - begin) % block] = 1
            if t < left { continue }
            ring[ringSlot(p)] = p
            write.values[t * convRing + ringSlot(p)] = 1
        }
        var keep = HostArray(zeros: [1, 1, 1, count])
        keep.values[0] = before > 0 ? 1 : 0
        folded = pending
        return [
            "conv_write_mask": write, "recurrent_read_mask": read, "recurrent_out_mask": out,
            "recurrent_keep_mask": keep,
        ]
    }
}

/// Return cos and sin for every position below `positions`, [positions, rope_dim / 2], the attention factor included.
///
/// The angle is the product of two fp32 numbers, rounded to fp32, as in the tables that the gates measured.
func ropeTable(_ rope: RopeTable, positions: Int) -> (cos: [Float], sin: [Float]) {
    let frequencies = rope.inv_freq.map { Float($0) }
    let scale = Float(rope.scale)
    var cosines = [Float]()
    var sines = [Float]()
    cosines.reserveCapacity(positions * frequencies.count)
    sines.reserveCapacity(positions * frequencies.count)
    for p in 0..<positions {
        for frequency in frequencies {
            let angle = Double(Float(p) * frequency)
            cosines.append(Float(cos(angle)) * scale)
            sines.append(Float(sin(angle)) * scale)
        }
    }
    return (cosines, sines)
}

/// Return cos and sin of positions of any size. The angle is fp64: fp32 would lose a step of one position.
func ropeRows(_ rope: RopeTable, _ positions: [Int]) -> (cos: [Float], sin: [Float]) {
    let scale = Float(rope.scale)
    let angles = positions.flatMap { p in rope.inv_freq.map { Double(p) * Double(Float($0)) } }
    return (angles.map { Float(cos($0)) * scale }, angles.map { Float(sin($0)) * scale })
}

/// Return [1, 1, T, S]: 0 where slot s holds a position <= the token's, within its window, otherwise -1e4.
func attentionMask(_ held: ArraySlice<Int>, _ positions: [Int], _ window: Int? = nil) -> HostArray {
    var mask = HostArray(shape: [1, 1, positions.count, held.count], values: [])
    mask.values = [Float](unsafeUninitializedCapacity: positions.count * held.count) { into, count in
        held.withUnsafeBufferPointer { held in
            for (t, p) in positions.enumerated() {
                let oldest = window.map { p - $0 } ?? Int.min
                for s in 0..<held.count {
                    into[t * held.count + s] = held[s] <= p && held[s] > oldest ? 0 : masked
                }
            }
        }
        count = positions.count * held.count
    }
    return mask
}

/// Return [1, 1, S, T], one-hot: row s, column t = 1 writes token t into slot s.
func writeMask(_ slots: Int, _ where_: [Int]) -> HostArray {
    var mask = HostArray(zeros: [1, 1, slots, where_.count])
    for (t, slot) in where_.enumerated() { mask.values[slot * where_.count + t] = 1 }
    return mask
}
