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
