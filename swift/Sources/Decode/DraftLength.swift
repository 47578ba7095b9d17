/// How many drafted tokens to verify: the number with the most expected tokens for the time of a pass.
///
/// The time of each width and the rate at which drafts of a stated confidence are right are measured as the text is
/// generated. The choice affects nothing but speed.
struct DraftLength {
    private static let bins = 12
    private static let prior = 2.0  // trials that the stated confidence itself counts for
    private static let memory = 400.0  // trials of a bin after which older ones fade
    private static let smoothing = 0.2  // weight of the newest pass in a width's time
    private static let probe = 32  // passes after which a width that was given up is tried again

    private var right: [Double]
    private var tried: [Double]
    private var seconds: [Int: Double] = [:]
    private var idle = 0

    init() {
        right = [Double](repeating: 0, count: Self.bins + 1)
        tried = right
    }

    /// Record that a pass of `width` tokens took `time` seconds. The first of each width is a warm-up and is ignored.
    mutating func timed(_ width: Int, _ time: Double) {
        guard let before = seconds[width] else {
            seconds[width] = 0
            return
        }
        seconds[width] = before == 0 ? time : before + Self.smoothing * (time - before)
    }

    /// Record that the first `accepted` tokens of a draft were right.
    mutating func observe(_ draft: Draft, accepted: Int) {
        for (place, stated) in draft.confidence.prefix(accepted + 1).enumerated() {
            let bin = Int(stated * Double(Self.bins))
            if tried[bin] >= Self.memory { (right[bin], tried[bin]) = (right[bin] / 2, tried[bin] / 2) }
            tried[bin] += 1
            if place < accepted { right[bin] += 1 }
        }
    }

    /// Return how many tokens of a draft to verify.
    ///
    /// - Parameter width: the width of a pass for a number of tokens.
    mutating func choose(_ draft: Draft, width: (Int) -> Int) -> Int {
        let single = seconds[1] ?? 0
        var (best, rate, alive, expected) = (0, 1.0, 1.0, 0.0)
        for (place, stated) in draft.confidence.enumerated() {
            let bin = Int(stated * Double(Self.bins))
            alive *= (right[bin] + Self.prior * stated) / (tried[bin] + Self.prior)
            expected += alive
            let time = seconds[width(place + 2)] ?? 0
            let cost = single > 0 && time > 0 ? max(1, time / single) : 1
            if (1 + expected) / cost > rate { (best, rate) = (place + 1, (1 + expected) / cost) }
        }
        idle = best > 0 || draft.tokens.isEmpty ? 0 : idle + 1
        if idle < Self.probe { return best }
        idle = 0
        return draft.tokens.count
    }
}
