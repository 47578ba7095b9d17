import Foundation

/// How a conversation becomes text: what stands before and after each message, and what an answer begins with.
///
/// The build proves it against the checkpoint's chat template; a template that does more is not in model.json.
public struct ChatFormat: Decodable, Equatable, Sendable {
    /// Who says a message.
    package enum Role: String, Sendable {
        /// The app's instructions.
        case system
        /// The user.
        case user
        /// The model.
        case assistant
    }

    /// What becomes of the messages of a role.
    public struct Around: Decodable, Equatable, Sendable {
        /// The text before a message.
        public let before: String
        /// The text after a message.
        public let after: String
        /// What a message loses at its ends; nil is nothing.
        package let strip: Strip?
        /// What of a message does not count; nil is nothing.
        package let cut: Cut?
        /// Whether a system message of which nothing is left counts as none; nil is false.
        package let skip_empty: Bool?
        /// Texts that a message must not contain, as the template does something else with them; nil is none.
        package let interprets: [String]?

        /// Return what is left of a message.
        func edited(_ text: String) -> String {
            let text = strip?.stripped(text) ?? text
            let scalars = Array(text.unicodeScalars.reversed())
            guard let cut, let last = first(of: [cut.mark.unicodeScalars.reversed()], in: scalars) else { return text }
            let rest = String(String.UnicodeScalarView(scalars[..<last].reversed()))
            return cut.strip?.stripped(rest) ?? rest
        }

        /// Return the first of the texts to which a template gives a meaning that is in a message.
        func interpreted(_ text: String) -> String? {
            let scalars = Array(text.unicodeScalars)
            return interprets?.first { first(of: [Array($0.unicodeScalars)], in: scalars) != nil }
        }
    }

    /// Of a message that contains a mark, only what follows the mark's last place counts.
    package struct Cut: Decodable, Equatable, Sendable {
        /// The mark.
        package let mark: String
        /// What the rest then loses at its ends; nil is nothing.
        package let strip: Strip?
    }

    /// Which characters a text loses at its ends.
    package struct Strip: Decodable, Equatable, Sendable {
        /// Where characters are lost.
        package enum Ends: String, Decodable, Sendable {
            /// At the beginning and at the end.
            case both
            /// At the beginning.
            case start
            /// At the end.
            case end
        }

        /// Where characters are lost; nil is nowhere.
        package let ends: Ends?
        /// The characters; nil is white space.
        package let characters: String?

        /// Read `true`, which is white space at both ends, `false` or an object.
        package init(from decoder: any Decoder) throws {
            if let whole = try? decoder.singleValueContainer().decode(Bool.self) {
                (ends, characters) = (whole ? .both : nil, nil)
                return
            }
            let keys = try decoder.container(keyedBy: CodingKeys.self)
            ends = try keys.decode(Ends.self, forKey: .ends)
            characters = try keys.decodeIfPresent(String.self, forKey: .characters)
        }

        private enum CodingKeys: String, CodingKey { case ends, characters }

        /// Return what is left of a text, as Python's `str.strip` and its kin leave it.
        func stripped(_ text: String) -> String {
            let lost = characters.map { Set($0.unicodeScalars) }
            let isLost = { (scalar: Unicode.Scalar) in lost?.contains(scalar) ?? isSpace(scalar) }
            var scalars = text.unicodeScalars[...]
            if ends == .both || ends == .start { scalars = scalars.drop(while: isLost) }
            if ends == .both || ends == .end, let last = scalars.lastIndex(where: { !isLost($0) }) {
                scalars = scalars[...last]
            } else if ends == .end {
                scalars = scalars.prefix(0)
            }
            return String(scalars)
        }
    }

    /// The marks between which a model thinks before its answer.
    public struct Thoughts: Decodable, Equatable, Sendable {
        /// The text before a thought.
        public let begin: String
        /// The text after it.
        public let end: String

        /// Return whether a prompt ends in a thought, which the model continues.
        package func isOpened(by prompt: String) -> Bool {
            trailing(prompt).unicodeScalars.reversed().starts(with: trailing(begin).unicodeScalars.reversed())
        }

        private func trailing(_ text: String) -> String {
            let last = text.unicodeScalars.lastIndex { !isSpace($0) }
            return last.map { String(text.unicodeScalars[...$0]) } ?? ""
        }
    }

    /// The text before everything else.
    package let begin: String
    /// The text in place of a system message, if there is none; nil is none.
    package let withoutSystem: String?
    /// What becomes of a system message; nil if there is no place for one.
    public let system: Around?
    /// What becomes of a question.
    package let user: Around
    /// What becomes of an answer.
    package let assistant: Around
    /// The text after which the answer begins.
    package let generate: String
    /// Tokens that end an answer, beside `eos_token_ids`.
    package let stop: [Int]
    /// Parts of the texts in whose place the date stands, and the directives of `strftime` for each; nil is none.
    package let dates: [String: String]?
    /// The marks of thoughts; nil if the model does not think between marks.
    public let thoughts: Thoughts?
    /// Whether an answer has channels, as harmony calls them; nil is false.
    package let channels: Bool?

    enum CodingKeys: String, CodingKey, CaseIterable {
        case begin, system, user, assistant, generate, stop, dates, thoughts, channels
        case withoutSystem = "without_system"
    }

    /// Return the text of a conversation, up to where the answer begins.
    ///
    /// - Parameters:
    ///   - messages: the conversation.
    ///   - date: the day that the text names, if the format names one.
    /// - Throws: `ShardmillError` of kind `request` if the conversation is not of the form that the build has proven: a
    ///   system message if there is a place for one, then questions and answers in turn, a question at the end.
    package func text(of messages: [(role: Role, content: String)], on date: Date = Date()) throws -> String {
        var told = messages.first?.role == .system
        if told && system == nil {
            throw ShardmillError(.request, "the model's chat format has no place for instructions")
        }
        let inTurn = messages.dropFirst(told ? 1 : 0).enumerated().allSatisfy { place, message in
            message.role == (place.isMultiple(of: 2) ? .user : .assistant)
        }
        if !inTurn || (messages.count - (told ? 1 : 0)).isMultiple(of: 2) {
            throw ShardmillError(.request, "a conversation needs questions and answers in turn, a question at the end")
        }
        var messages = messages[...]
        if told, let system, system.skip_empty == true, system.edited(messages[0].content).isEmpty {
            (told, messages) = (false, messages.dropFirst())
        }
        var text = dated(begin + (told ? "" : withoutSystem ?? ""), date)
        for message in messages {
            let around = message.role == .user ? user : message.role == .assistant ? assistant : system ?? user
            if let mark = around.interpreted(message.content) {
                throw ShardmillError(
                    .request,
                    "a message of the \(message.role.rawValue) contains '\(mark)', to which the model's chat template "
                        + "gives a meaning: leave it out")
            }
            text += dated(around.before, date) + around.edited(message.content) + dated(around.after, date)
        }
        return text + dated(generate, date)
    }

    private func dated(_ text: String, _ date: Date) -> String {
        (dates ?? [:]).reduce(text) { text, part in
            text.replacingOccurrences(of: part.key, with: strftime(part.value, date), options: .literal)
        }
    }
}

/// Return whether Python counts a character as white space.
func isSpace(_ scalar: Unicode.Scalar) -> Bool {
    scalar.properties.isWhitespace || (0x1C...0x1F).contains(scalar.value)
}

/// Return a date as Python's `strftime` writes it in English, by the directives that model.json may have.
private func strftime(_ directives: String, _ date: Date) -> String {
    let months = [
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December",
    ]
    let days = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
    var calendar = Calendar(identifier: .gregorian)
    calendar.timeZone = .current
    let parts = calendar.dateComponents([.year, .month, .day, .weekday], from: date)
    let (year, month, day) = (parts.year ?? 0, parts.month ?? 1, parts.day ?? 1)
    let weekday = days[(parts.weekday ?? 1) - 1]
    func two(_ number: Int) -> String { number < 10 ? "0\(number)" : "\(number)" }
    var (text, rest) = ("", directives[...])
    while let next = rest.popFirst() {
        guard next == "%", let directive = rest.popFirst() else {
            text.append(next)
            continue
        }
        switch directive {
        case "Y": text += "\(year)"
        case "y": text += two(year % 100)
        case "m": text += two(month)
        case "d": text += two(day)
        case "B": text += months[month - 1]
        case "b": text += months[month - 1].prefix(3)
        case "A": text += weekday
        case "a": text += weekday.prefix(3)
        default: text += "%\(directive)"
        }
    }
    return text
}
