import Foundation
import Testing

@testable import ShardmillDecode

private struct RecordedChat: Decodable {
    struct Talk: Decodable {
        let messages: [[String]]
        let text: String
    }

    let format: ChatFormat
    let talks: [Talk]
}

@Test("conversations are written as chat templates write them")
func chats() throws {
    let cases = try vectors("chats", RecordedChat.self)
    #expect(cases.count >= 5)
    for one in cases {
        for talk in one.talks {
            let messages = try talk.messages.map { (try #require(ChatFormat.Role(rawValue: $0[0])), $0[1]) }
            #expect(try one.format.text(of: messages).utf8.elementsEqual(talk.text.utf8))
        }
    }
}

@Test("a conversation of another form is refused")
func oddChats() throws {
    func format(system: Bool) throws -> ChatFormat {
        let build = try ToyBuild { $0["chat"] = chat(system: system, strip: false) }
        return try #require(try Manifest(folder: build.folder).chat)
    }
    let (plain, whole) = (try format(system: false), try format(system: true))
    #expect(try plain.text(of: [(.user, " a ")]) == "<s><user> a </user><model>")
    #expect(try whole.text(of: [(.user, "a")]) == "<s><none/><user>a</user><model>")
    #expect(try whole.text(of: [(.system, "b"), (.user, "a")]) == "<s><system>b</system><user>a</user><model>")
    #expect(throws: ShardmillError.self) { try plain.text(of: [(.system, "b"), (.user, "a")]) }
    let odd: [[(role: ChatFormat.Role, content: String)]] = [
        [], [(.system, "a")], [(.assistant, "a")], [(.user, "a"), (.user, "b")], [(.user, "a"), (.assistant, "b")],
        [(.user, "a"), (.system, "b"), (.user, "c")], [(.system, "a"), (.system, "b"), (.user, "c")],
    ]
    for messages in odd { #expect(throws: ShardmillError.self) { try whole.text(of: messages) } }
}

/// A format with all that `conversation` may say.
private let whole = #"""
    {"begin": "[[day]]", "system": {"before": "<s>", "after": "</s>", "strip": {"ends": "end"}, "skip_empty": true,
    "interprets": ["/off"]}, "without_system": "(none)", "user": {"before": "<u>", "after": "</u>"},
    "assistant": {"before": "<a>", "after": "</a>", "strip": true,
    "cut": {"mark": "</think>", "strip": {"ends": "start", "characters": "\n"}}}, "generate": "<a>", "stop": [],
    "dates": {"[[day]]": "%A %a %d %B %b %m %Y %y"}, "thoughts": {"begin": "<think>", "end": "</think>"}}
    """#

@Test("dates, cuts, empty instructions and texts with a meaning are as conversation of model.json says")
func wholeChats() throws {
    let format = try JSONDecoder().decode(ChatFormat.self, from: Data(whole.utf8))
    var calendar = Calendar(identifier: .gregorian)
    calendar.timeZone = .current
    let day = try #require(calendar.date(from: DateComponents(year: 2026, month: 3, day: 1, hour: 12)))
    func text(_ messages: [(ChatFormat.Role, String)]) throws -> String {
        try format.text(of: messages.map { (role: $0, content: $1) }, on: day)
    }
    let date = "Sunday Sun 01 March Mar 03 2026 26"
    #expect(try text([(.user, "[[day]]")]) == date + "(none)<u>[[day]]</u><a>")
    #expect(try text([(.system, " \n"), (.user, "q")]) == date + "(none)<u>q</u><a>")
    #expect(try text([(.system, " b \n"), (.user, "q")]) == date + "<s> b</s><u>q</u><a>")
    let answer = " x</think>y</think>\n\n  z\n "
    #expect(try text([(.user, "q"), (.assistant, answer), (.user, "r")]) == date + "(none)<u>q</u><a>  z</a><u>r</u><a>")
    do {
        _ = try text([(.system, "turn it /off"), (.user, "q")])
        Issue.record("a text with a meaning was taken")
    } catch let error as ShardmillError {
        #expect(error.kind == .request && error.message.contains("'/off'"))
    }
    #expect(try text([(.user, "/off")]) == date + "(none)<u>/off</u><a>")
}

@Test("a key of conversation that is not known leaves chat")
func unknownConversations() throws {
    for (key, begins) in [("begin", "[[day]]"), ("later", "<s>")] {
        let build = try ToyBuild {
            $0["chat"] = chat(system: true, strip: false)
            var more = try? JSONSerialization.jsonObject(with: Data(whole.utf8)) as? [String: Any]
            if key == "later" { more?[key] = 1 }
            $0["conversation"] = more
        }
        #expect(try Manifest(folder: build.folder).chat?.begin == begins)
    }
}

@Test("an answer is split the same however it is cut")
func splitAnswers() throws {
    let format = try JSONDecoder().decode(ChatFormat.self, from: Data(whole.utf8))
    let cases: [(text: String, opened: Bool, thought: String, answer: String)] = [
        ("<think>\nHm, yes.\n</think>\n\nIt is.", false, "Hm, yes.", "It is."),
        ("Hm.\n</think>\nIt is. </think>", true, "Hm.", "It is. </think>"),
        (" It is. <think>no</think>", false, "", " It is. <think>no</think>"),
        ("<think> </think> ", false, "", ""), ("<thin", false, "", "<thin"),
        ("<think>cut off </think", false, "cut off </think", ""),
        ("\u{3000}<think>a  b</think>e\u{301}", false, "a  b", "e\u{301}"),
    ]
    for one in cases {
        let scalars = Array(one.text.unicodeScalars)
        for size in 1...max(1, scalars.count) {
            var reader = AnswerReader(format, opened: one.opened)
            var pieces: [AnswerPiece] = []
            for start in stride(from: 0, to: scalars.count, by: size) {
                let piece = scalars[start..<min(start + size, scalars.count)]
                pieces += reader.push(String(String.UnicodeScalarView(piece)))
            }
            pieces += reader.push("", ended: true)
            var (thought, answer) = ("", "")
            for piece in pieces {
                switch piece {
                case .thought(let text): thought += text
                case .text(let text): answer += text
                case .call: Issue.record("no call")
                }
            }
            #expect(thought == one.thought && answer == one.answer, "\(one.text) by \(size)")
        }
    }
    #expect(format.thoughts?.isOpened(by: "<a>\n<think>\n") == true && format.thoughts?.isOpened(by: "<a>") == false)
}

@Test("harmony's channels are thoughts, calls and the answer")
func splitChannels() throws {
    let around = #"{"before": "", "after": ""}"#
    let text = #"{"begin": "", "user": \#(around), "assistant": \#(around), "generate": "", "stop": [], "channels": true}"#
    let format = try JSONDecoder().decode(ChatFormat.self, from: Data(text.utf8))
    var reader = AnswerReader(format, opened: false)
    let answer =
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{}"
        + "<|call|><|start|>assistant<|channel|>final<|message|>It is.<|return|>"
    let pieces = reader.push(answer) + reader.push("", ended: true)
    #expect(pieces == [.thought("Hm."), .call("{}"), .text("It is.")])
    var plain = AnswerReader(format, opened: false)
    #expect(plain.push("It is.") + plain.push("", ended: true) == [.text("It is.")])
}

/// Return an answer's pieces, told in texts of some characters.
private func pieces(_ answer: String, by size: Int) -> [AnswerPiece] {
    let scalars = Array(answer.unicodeScalars)
    var reader = AnswerReader(nil, opened: false)
    var found: [AnswerPiece] = []
    for start in stride(from: 0, to: scalars.count, by: size) {
        found += reader.push(String(String.UnicodeScalarView(scalars[start..<min(start + size, scalars.count)])))
    }
    return found + reader.push("", ended: true)
}

@Test("calls in JSON between marks are values, all else is text, and the pieces are the answer however it is cut")
func functionCalls() {
    let turn = #"{"name": "turn", "arguments": {"stone": "a </tool_call> {", "n": [1, 2.50]}}"#
    let arguments = #"{"stone": "a </tool_call> {", "n": [1, 2.50]}"#
    let one = FunctionCall.read("<tool_call>\n\(turn)\n</tool_call>").calls
    #expect(one.map(\.name) == ["turn"] && one.map(\.arguments) == [arguments])
    let cases: [(answer: String, text: String, calls: [String])] = [
        ("It is.", "It is.", []), ("", "", []), (" \n ", " \n ", []),
        ("I look.\n<tool_call>\n\(turn)\n</tool_call>\nDone. ", "I look.Done.", ["turn"]),
        ("<tool_call>\(turn)</tool_call>\n<tool_call>\(turn)</tool_call>\n", "", ["turn", "turn"]),
        ("<tool_call>[\(turn), \(turn)]</tool_call>", "", ["turn", "turn"]),
        ("<tool_call>\(turn)</tool_ca", "", ["turn"]), ("<tool_call>\(turn) and more", "and more", ["turn"]),
        (#"<tool_call>{"parameters": {}, "name": "f", "id": 1}</tool_call>"#, "", ["f"]),
        (#"<tool_call>{"name": "f"}</tool_call>"#, "", ["f"]),
        (#"<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{}"}}</tool_call>"#, "", ["f"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"two\nlines\"}}</tool_call>", "", ["f"]),
    ]
    for one in cases {
        let found = FunctionCall.read(one.answer)
        #expect(found.text == one.text && found.calls.map(\.name) == one.calls, "\(one.answer): \(found)")
    }
    let texts = [
        "<tool_call>", "<tool_call> a mark", "<tool_call>{\"name\": \"f\", \"arguments\": {", "<tool_call>{}</tool_call>",
        #"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#, #"<tool_call>{"name": 1}</tool_call>"#, "<tool_",
        #"<tool_call>{"name": "f", "arguments": "none"}</tool_call>"#, "</tool_call>", #"{"name": "f", "arguments": {}}"#,
        "<tool_call><function=f></function></tool_call>", #"<tool_call>{"name": f}</tool_call>"#,
    ]
    for text in texts { #expect(FunctionCall.read(text).text == text && FunctionCall.read(text).calls.isEmpty) }
    for answer in cases.map(\.answer) + texts {
        for size in 1...max(1, answer.unicodeScalars.count) {
            let found = pieces(answer, by: size)
            var (whole, called) = ("", "")
            for piece in found {
                switch piece {
                case .text(let more): whole += more
                case .call(let more): (whole, called) = (whole + more, called + more)
                case .thought: Issue.record("no thought")
                }
            }
            #expect(whole == answer, "\(answer) by \(size)")
            #expect(FunctionCall.read(called).calls == FunctionCall.read(answer).calls, "\(answer) by \(size)")
        }
    }
}
