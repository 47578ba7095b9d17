/// The passes of a text.
struct Windows: Equatable {
    /// The tokens of each pass.
    var tokens: [[Int]] = []
    /// The rows of each pass that belong to the text.
    var taken: [Range<Int>] = []
    /// True if these rows equal the rows of the whole text in one pass.
    var isExact = true

    /// An approximation drops this part of a window at either end.
    private static let share = 4
    /// Exact windows advance by at least this part of a window.
    private static let leastStep = 4

    /// A window, and those of its tokens whose rows are used.
    private struct Cut {
        let window: Range<Int>
        let used: Range<Int>
    }

    init() {}

    /// Divide a text into passes.
    ///
    /// If windows are exact, special tokens stand only at the ends of the text. Otherwise they surround every window,
    /// as the model expects for a text.
    ///
    /// - Parameters:
    ///   - text: the text's tokens.
    ///   - before: the special tokens before every text.
    ///   - after: the special tokens after every text.
    ///   - longest: the most tokens of a pass.
    ///   - reach: the largest distance at which one token influences another; nil if unlimited.
    init(_ text: [Int], before: [Int], after: [Int], longest: Int, reach: Int?) throws {
        let whole = before + text + after
        if whole.count <= longest || Self.areExact(longest, reach) {
            for cut in Self.cuts(whole.count, longest, reach) {
                let own = cut.used.clamped(to: before.count..<before.count + text.count)
                let first = max(cut.used.lowerBound, before.count) - cut.window.lowerBound
                tokens.append(Array(whole[cut.window]))
                taken.append(first..<first + own.count)
            }
            return
        }
        let room = longest - before.count - after.count
        if room < 1 {
            throw ShardmillError(.build, "special tokens alone fill a pass of \(longest) tokens; build larger buckets")
        }
        isExact = false
        for cut in Self.cuts(text.count, room, reach) {
            let first = before.count + cut.used.lowerBound - cut.window.lowerBound
            tokens.append(before + Array(text[cut.window]) + after)
            taken.append(first..<first + cut.used.count)
        }
    }

    /// Return windows over `count` tokens.
    private static func cuts(_ count: Int, _ longest: Int, _ reach: Int?) -> [Cut] {
        if count <= longest { return [Cut(window: 0..<count, used: 0..<count)] }
        let margin = areExact(longest, reach) ? reach ?? 0 : longest / share
        return stride(from: 0, to: count - 2 * margin, by: longest - 2 * margin).map { start in
            let end = min(start + longest, count)
            return Cut(
                window: start..<end, used: (start == 0 ? 0 : start + margin)..<(end < count ? end - margin : count))
        }
    }

    /// Return whether windows of at most `longest` tokens give the same rows as the whole text.
    private static func areExact(_ longest: Int, _ reach: Int?) -> Bool {
        reach.map { leastStep * (longest - 2 * $0) >= longest } ?? false
    }

    /// Return a row for each token of the text, given the rows of each pass.
    func joined(_ rows: [Rows]) -> Rows {
        let values = zip(rows, taken).flatMap { rows, own in
            rows.values[own.lowerBound * rows.columns..<own.upperBound * rows.columns]
        }
        return Rows(columns: rows.first?.columns ?? 0, values: Array(values))
    }
}
